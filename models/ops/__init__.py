"""Custom operators, real and fake side by side. Imports nothing else of ours."""
