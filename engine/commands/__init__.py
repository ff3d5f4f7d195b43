"""What the command line's verbs do: one module a verb, `run(args, config) -> exit status`."""
