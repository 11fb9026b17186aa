"""The command line: ``oasr`` and its subcommands, each a module on the ``oasr.commands`` axis."""
