"""Starts one vLLM engine that answers requests from its standard input until the input ends.

Run `python vllm_live.py SETTINGS` in vLLM's virtual environment. SETTINGS is a JSON object:

- `model`: a directory.
- `connector`: vLLM's `kv_transfer_config`, or null.
- `engine`: further options of the engine.
- `watch`: whether it prints the observations of a `vllm_watch.Watch`.

Each line of the input is a JSON object: `id`, `prompt` (token numbers), `tokens` (how many to answer), and `kv`
(vLLM's `kv_transfer_params`, or null). With `call` instead of a prompt, it calls `mark` or `unmark` of the
watch, or `vllm_watch.hold`. The engine also steps while no request runs, as vLLM's own loop does: connectors
end their work in steps. Each line of the output that begins with `>>> ` is a JSON object:

- `ready`: true, once.
- `id`, `tokens`, `cached`, `kv` (the answer's `kv_transfer_params`), and `seconds` since the arrival of the
  request.
- `id` and `failed`, for a request that failed.
- `at` and an observation of the watch at that time.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

# With one process an engine starts in a third of the time, and its output is in order.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch

if not torch.accelerator.is_available():
    # vLLM's connector for Mooncake asks for the number of the device, and a CPU has none.
    torch.accelerator.current_device_index = lambda: 0

if len(os.sched_getaffinity(0)) < 4:
    # A waiting rank calls sched_yield in a loop. With a rank on each core, Linux 6.18 then ran no thread of
    # other processes for seconds.
    os.sched_yield = lambda: time.sleep(0.0001)

import vllm_watch

if json.loads(sys.argv[1]).get("watch"):
    vllm_watch.prepare()

import vllm_options
from vllm import LLM, SamplingParams, TokensPrompt

_IDLE = 0.001


def say(**what: Any) -> None:
    """Prints a line for the process that started this process. Threads call it too."""
    sys.stdout.write(f">>> {json.dumps(what)}\n")
    sys.stdout.flush()


def read_lines(lines: queue.Queue[str | None]) -> None:
    """Puts every line of the input into the queue, and `None` at the end of the input."""
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


def main() -> None:
    settings = json.loads(sys.argv[1])
    llm = LLM(**vllm_options.of_engine(settings))
    engine = llm.llm_engine
    watch = vllm_watch.Watch(engine, say) if settings.get("watch") else None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=read_lines, args=(lines,), daemon=True).start()
    began: dict[str, float] = {}
    say(ready=True)
    while True:
        try:
            line = lines.get(timeout=0.0 if began else _IDLE)
        except queue.Empty:
            line = ""
        if line is None:
            break
        if line:
            asked = json.loads(line)
            if "call" in asked:
                if watch is not None and asked["call"] == "mark":
                    watch.mark()
                elif watch is not None and asked["call"] == "unmark":
                    watch.unmark()
                elif asked["call"] == "hold":
                    vllm_watch.hold()
                say(id=asked["id"])
                continue
            extra = {"kv_transfer_params": asked["kv"]} if asked.get("kv") else None
            greedy = SamplingParams(
                temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, extra_args=extra
            )
            began[asked["id"]] = time.monotonic()
            engine.add_request(asked["id"], TokensPrompt(prompt_token_ids=asked["prompt"]), greedy)
        for answer in engine.step():
            # The engine may extend the name of a request.
            name = next((name for name in began if answer.request_id.startswith(name)), None)
            if name is None or not answer.finished:
                continue
            seconds = round(time.monotonic() - began.pop(name), 3)
            only = answer.outputs[0]
            if only.finish_reason != "length":
                say(id=name, failed=str(only.finish_reason), seconds=seconds)
                continue
            say(
                id=name,
                tokens=list(only.token_ids),
                cached=answer.num_cached_tokens,
                kv=answer.kv_transfer_params,
                seconds=seconds,
            )
    engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
