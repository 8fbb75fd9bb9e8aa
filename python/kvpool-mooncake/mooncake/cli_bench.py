"""The command transfer_engine_bench."""

from mooncake.commands.bench import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
