"""HTTP side of the server: OpenAI-compatible routes over an EngineClient. Never imports torch."""
