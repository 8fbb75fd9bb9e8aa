"""transfer_engine_topology_dump: the RDMA devices that an engine of this host uses, as JSON.

The original's options for a backend and for custom topologies have no effect: kvpool pairs ports by probing.
"""

from __future__ import annotations

import argparse
import logging
import sys

from mooncake.engine import TransferEngine as _TransferEngine

__all__ = ["main", "parse_args"]

_log = logging.getLogger("mooncake.topology")


def parse_args() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("transfer_engine_topology_dump", description="The RDMA devices of this host")
    parser.add_argument("--device-name", default="", help="only these devices, separated by commas")
    parser.add_argument("--backend", choices=("auto", "te", "tent"), default="auto", help="no effect: there is one")
    parser.add_argument("--use-custom-topo", action="store_true", help="no effect: ports are paired by probing")
    parser.add_argument("--custom-topo-json", help="no effect: ports are paired by probing")
    return parser.parse_args()


def main() -> int:
    """Runs the command."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    args = parse_args()
    for name, given in (
        ("--backend", args.backend != "auto"),
        ("--use-custom-topo", args.use_custom_topo),
        ("--custom-topo-json", args.custom_topo_json is not None),
    ):
        if given:
            _log.warning("%s has no effect: kvpool has one engine, which pairs ports by probing", name)
    engine = _TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", args.device_name) != 0:
        return 1
    try:
        print(f"Local topology: {engine.get_local_topology(args.device_name)}")
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
