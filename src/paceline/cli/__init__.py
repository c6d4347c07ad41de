"""The command line: the only place where all parts meet; one file a command."""
