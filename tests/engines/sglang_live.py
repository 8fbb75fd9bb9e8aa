"""Starts one SGLang engine that answers requests from its standard input until the input ends.

Run `python sglang_live.py SETTINGS` in SGLang's virtual environment. SETTINGS is a JSON object with the options
of `sglang.Engine`. Each line of the input is a JSON object: `id`, `prompt` (token numbers), `tokens` (how many to
answer), and for a hand-off `port` (of the bootstrap server) and `room`. Each line of the output that begins with
`>>> ` is a JSON object, as in `vllm_live.py`.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import sglang


def say(**what: Any) -> None:
    """Prints a line for the process that started this one."""
    print(f">>> {json.dumps(what)}", flush=True)


def main() -> None:
    options = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": "float32",
        "page_size": 64,
        "chunked_prefill_size": 256,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "max_total_tokens": 8192,
        "mem_fraction_static": 0.1,
        **json.loads(sys.argv[1]),
    }
    engine = sglang.Engine(**options)
    say(ready=True)
    for line in sys.stdin:
        asked = json.loads(line)
        handoff = {}
        if "room" in asked:
            handoff = {
                "bootstrap_host": "127.0.0.1",
                "bootstrap_port": asked["port"],
                "bootstrap_room": asked["room"],
            }
        began = time.monotonic()
        try:
            answer = engine.generate(
                input_ids=asked["prompt"],
                sampling_params={"max_new_tokens": asked["tokens"], "temperature": 0, "ignore_eos": True},
                **handoff,
            )
        except Exception as error:  # noqa: BLE001
            say(id=asked["id"], failed=str(error), seconds=round(time.monotonic() - began, 3))
            continue
        say(
            id=asked["id"],
            tokens=answer["output_ids"],
            finished=answer["meta_info"]["finish_reason"],
            seconds=round(time.monotonic() - began, 3),
        )
    engine.shutdown()


if __name__ == "__main__":
    main()
