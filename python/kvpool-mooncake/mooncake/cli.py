"""The command mooncake_master."""

from mooncake.commands.master import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
