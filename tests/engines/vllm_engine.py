"""Starts one vLLM engine, gives it two prompts without a common prefix, and prints the result as JSON.

Run `python vllm_engine.py SETTINGS` in vLLM's virtual environment. SETTINGS is a JSON object:

- `model`: a directory.
- `connector`: vLLM's `kv_transfer_config`, or null.
- `wait_for`: a file. The ready engine creates `ready` beside it and waits until the file exists.
- `rounds`: the number of times that the prompts are sent, by default 1.
- `engine`: further options of the engine.

The last line of the output is a JSON object:

- `tokens`: the generated tokens, one list per prompt.
- `cached`: for each prompt, the number of tokens that were not computed.
- `seconds`: the duration of the first round.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

# With one process an engine starts in a third of the time, and its output is in order.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import vllm_options
from vllm import LLM, SamplingParams, TokensPrompt

PROMPT_TOKENS = 600
PROMPTS = 2
ANSWER_TOKENS = 16


def prompts() -> list[TokensPrompt]:
    """Two prompts of 600 tokens that differ from the first token on."""
    numbers = range(PROMPT_TOKENS)
    return [
        TokensPrompt(prompt_token_ids=[3 + (at * 7 + which * 131 + at // 97) % 500 for at in numbers])
        for which in range(PROMPTS)
    ]


def main() -> None:
    settings = json.loads(sys.argv[1])
    engine = LLM(**vllm_options.of_engine(settings))
    if "wait_for" in settings:
        gate = Path(settings["wait_for"])
        (gate.parent / "ready").touch()
        while not gate.exists():
            time.sleep(0.05)
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    started = time.monotonic()
    answers = engine.generate(prompts(), greedy, use_tqdm=False)
    seconds = time.monotonic() - started
    for _ in range(settings.get("rounds", 1) - 1):
        answers = engine.generate(prompts(), greedy, use_tqdm=False)
    # Saves in progress end before the engine.
    engine.llm_engine.engine_core.shutdown()
    result = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "cached": [answer.num_cached_tokens for answer in answers],
        "seconds": round(seconds, 3),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
