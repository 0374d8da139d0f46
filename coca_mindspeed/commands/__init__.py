"""The subcommands of ``coca-mindspeed``, one module each."""
