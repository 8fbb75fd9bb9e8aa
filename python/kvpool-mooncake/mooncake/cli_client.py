"""The command mooncake_client."""

from mooncake.commands.client import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
