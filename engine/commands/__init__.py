"""What each verb of the command line does: one module a verb, `run(args) -> exit status`."""
