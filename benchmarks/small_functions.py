"""Forty small Python functions that a model writes, over HTTP, and how many of them pass their tests.

    python benchmarks/small_functions.py FILE.gguf ours=http://127.0.0.1:8080 llama-server=http://127.0.0.1:8081 \\
        --transformers --save docs/results/MACHINE/quality-functions.json.gz

Each server, which serves this file, is asked for each function once, greedily, by the chat route of OpenAI; so is
transformers in float32, on dequantized weights, with `--transformers`. Answers run in a child process with limits of
processor time, memory and files, in an empty folder and without the environment of this process.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from llm_worker_bench.results import Recorder, Result, describe_model

MAX_TOKENS = 320
MAX_CPU_S, MAX_MEMORY, MAX_FILE = 5, 512 << 20, 1 << 16
FENCE = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", re.DOTALL)

# Signature: what it does, and calls with their results.
FUNCTIONS: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "is_even(n)": ("Return whether an integer is even.", [("2", True), ("7", False), ("0", True), ("-3", False)]),
    "factorial(n)": ("Return n!.", [("0", 1), ("1", 1), ("5", 120), ("10", 3628800)]),
    "fibonacci(n)": ("Return the n-th Fibonacci number; fibonacci(0) is 0.", [("0", 0), ("1", 1), ("10", 55)]),
    "is_prime(n)": ("Return whether n is prime.", [("1", False), ("2", True), ("9", False), ("97", True)]),
    "gcd(a, b)": ("Return the greatest common divisor.", [("12, 18", 6), ("7, 5", 1), ("0, 4", 4)]),
    "reverse_words(text)": ("Return the words of a text in reverse order.", [("'a b c'", "c b a"), ("'one'", "one")]),
    "is_palindrome(text)": (
        "Return whether a text reads the same backwards, letters only, ignoring case.",
        [("'A man, a plan, a canal: Panama'", True), ("'abc'", False), ("''", True)],
    ),
    "count_vowels(text)": ("Return how many of a, e, i, o, u are in a text.", [("'Banana'", 3), ("'XYZ'", 0)]),
    "flatten(lists)": ("Return the items of a list of lists in one list.", [("[[1, 2], [], [3]]", [1, 2, 3])]),
    "unique(items)": ("Return the items without repeats, in their first order.", [("[3, 1, 3, 2, 1]", [3, 1, 2])]),
    "second_largest(numbers)": ("Return the second largest distinct number.", [("[1, 5, 5, 3]", 3), ("[2, 1]", 1)]),
    "caesar(text, shift)": (
        "Shift each letter of a text by so many places in the alphabet, keeping case; leave other characters.",
        [("'abc', 1", "bcd"), ("'xyz', 3", "abc"), ("'Hi!', 2", "Jk!")],
    ),
    "binary_search(items, target)": (
        "Return the index of target in a sorted list, or -1.",
        [("[1, 3, 5, 7], 5", 2), ("[1, 3, 5, 7], 4", -1), ("[], 1", -1)],
    ),
    "merge_sorted(a, b)": ("Merge two sorted lists into one.", [("[1, 4], [2, 3]", [1, 2, 3, 4]), ("[], [1]", [1])]),
    "to_roman(n)": ("Return a number as a Roman numeral.", [("4", "IV"), ("9", "IX"), ("1994", "MCMXCIV")]),
    "from_roman(text)": ("Return the number of a Roman numeral.", [("'IV'", 4), ("'MCMXCIV'", 1994)]),
    "word_counts(text)": (
        "Return a dictionary of how often each word of a text occurs.", [("'a b a'", {"a": 2, "b": 1}), ("''", {})],
    ),
    "transpose(matrix)": ("Return the transpose of a matrix as lists.", [("[[1, 2], [3, 4]]", [[1, 3], [2, 4]])]),
    "is_leap_year(year)": ("Return whether a year is a leap year.", [("2000", True), ("1900", False), ("2024", True)]),
    "balanced(text)": (
        "Return whether the brackets ()[]{} of a text are balanced.",
        [("'([]{})'", True), ("'(]'", False), ("'(('", False), ("''", True)],
    ),
    "digits_sum(n)": ("Return the sum of the digits of an integer.", [("123", 6), ("0", 0), ("999", 27)]),
    "collatz_steps(n)": ("Return how many steps the Collatz sequence takes to reach 1.", [("1", 0), ("6", 8)]),
    "chunk(items, size)": (
        "Return the items in lists of a size; the last may be shorter.",
        [("[1, 2, 3, 4, 5], 2", [[1, 2], [3, 4], [5]])],
    ),
    "rotate(items, k)": ("Rotate a list to the right by k.", [("[1, 2, 3], 1", [3, 1, 2]), ("[1, 2], 4", [1, 2])]),
    "anagrams(a, b)": ("Return whether two texts are anagrams, ignoring case.", [("'Listen', 'Silent'", True)]),
    "mean(numbers)": ("Return the arithmetic mean.", [("[1, 2, 3]", 2.0), ("[4]", 4.0)]),
    "median(numbers)": ("Return the median.", [("[3, 1, 2]", 2), ("[1, 2, 3, 4]", 2.5)]),
    "mode(items)": ("Return the most frequent item.", [("[1, 2, 2, 3]", 2), ("['a', 'b', 'a']", "a")]),
    "power_set_size(items)": ("Return how many subsets a list of distinct items has.", [("[1, 2, 3]", 8), ("[]", 1)]),
    "title_case(text)": ("Make the first letter of each word a capital.", [("'hello big world'", "Hello Big World")]),
    "camel_to_snake(name)": ("Turn camelCase into snake_case.", [("'camelCase'", "camel_case"), ("'aBC'", "a_b_c")]),
    "primes_up_to(n)": ("Return all primes up to n.", [("10", [2, 3, 5, 7]), ("1", [])]),
    "longest_word(text)": ("Return the longest word; of equals the first.", [("'a bbb cc ddd'", "bbb")]),
    "run_length(text)": (
        "Return a list of (character, count) for the runs of a text.",
        [("'aabccc'", [["a", 2], ["b", 1], ["c", 3]]), ("''", [])],
    ),
    "invert(mapping)": ("Swap keys and values of a dictionary.", [("{'a': 1, 'b': 2}", {1: "a", 2: "b"})]),
    "common(a, b)": ("Return the sorted items that two lists share.", [("[1, 2, 3], [3, 2, 5]", [2, 3])]),
    "clamp(x, low, high)": ("Return x, but at least low and at most high.", [("5, 1, 3", 3), ("0, 1, 3", 1)]),
    "hex_to_rgb(color)": ("Turn '#rrggbb' into a tuple of three integers.", [("'#ff8000'", [255, 128, 0])]),
    "triangle(n)": ("Return the first n rows of Pascal's triangle.", [("4", [[1], [1, 1], [1, 2, 1], [1, 3, 3, 1]])]),
    "max_subarray(numbers)": ("Return the largest sum of a contiguous part.", [("[-2, 1, -3, 4, -1, 2, 1, -5, 4]", 6)]),
}  # fmt: skip


class Outcome(NamedTuple):
    """Whether a function passes, why not, and the answer."""

    is_right: bool
    reason: str
    text: str


def prompt_for(signature: str, about: str) -> str:
    """Return the question for a function."""
    start = f'def {signature}:\n    """{about}"""'
    return f"Write this Python function. Answer with one code block.\n\n```python\n{start}\n```"


def run(signature: str, text: str) -> tuple[bool, str]:
    """Run the function of an answer with its tests, in a bounded child; return whether all are right, or why not."""
    blocks = FENCE.findall(text)
    name = signature.partition("(")[0]
    checks = [
        f"got = {name}({args})\nassert plain(got) == plain({result!r}), {args!r} + ': ' + repr(got)[:100]"
        for args, result in FUNCTIONS[signature][1]
    ]
    plain = (
        "def plain(x):\n    return [plain(y) for y in x] if isinstance(x, (list, tuple)) else "
        "{k: plain(v) for k, v in x.items()} if isinstance(x, dict) else x"
    )
    source = "\n".join(["\n".join(blocks) or text, plain, *checks])
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", source], cwd=folder, env={}, capture_output=True, text=True,
                timeout=4 * MAX_CPU_S, preexec_fn=limit_resources, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False, "it takes too long"
    return done.returncode == 0, (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]


def limit_resources() -> None:
    """Bound the child."""
    for kind, limit in (
        (resource.RLIMIT_CPU, MAX_CPU_S), (resource.RLIMIT_AS, MAX_MEMORY), (resource.RLIMIT_FSIZE, MAX_FILE),
        (resource.RLIMIT_NOFILE, 32), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(kind, (limit, limit))


def ask_server(url: str, prompt: str) -> str:
    """Return the greedy answer of a server."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": MAX_TOKENS, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=900) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def make_transformers(path: Path) -> Callable[[str], str]:
    """Return a function that asks transformers, with the weights of a GGUF file in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = {"gguf_file": path.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, **files)
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **files)

    def ask(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False)
        return str(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))

    return ask


def main() -> None:
    """Print a row for each side, and save the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="FILE.gguf", help="the file that all sides answer from")
    parser.add_argument("servers", nargs="*", metavar="NAME=URL")
    parser.add_argument("--transformers", action="store_true", help="ask transformers, too")
    parser.add_argument("--at-once", type=int, default=1, help="requests at once")
    parser.add_argument("--save", type=Path, help="write the run, with its answers")
    options = parser.parse_args()
    sources: dict[str, Callable[[str], str]] = {}
    for server in options.servers:
        name, _, url = server.partition("=")
        sources[name] = partial(ask_server, url.rstrip("/"))
    if options.transformers:
        sources["transformers"] = make_transformers(options.model)
    recorder = Recorder("functions", model=describe_model(options.model, lambda *_: None))
    recorder.command = shlex.join(["python", "benchmarks/small_functions.py", options.model.name, *sys.argv[2:]])
    prompts = [prompt_for(signature, about) for signature, (about, _) in FUNCTIONS.items()]
    print("| | right | seconds |\n| --- | --- | --- |")
    for name, ask in sources.items():
        start = time.perf_counter()
        with ThreadPoolExecutor(1 if name == "transformers" else options.at_once) as pool:
            texts = list(pool.map(ask, prompts))
        seconds = time.perf_counter() - start
        outcomes = {
            signature: Outcome(*run(signature, text), text) for signature, text in zip(FUNCTIONS, texts, strict=True)
        }
        wrong = [signature.partition("(")[0] for signature, outcome in outcomes.items() if not outcome.is_right]
        fields = {"count": len(outcomes), "seconds": round(seconds, 1), "wrong": wrong}
        recorder.add_result(Result.exact(f"right/{name}", "", len(outcomes) - len(wrong), "higher", **fields))
        recorder.details[name] = {signature: outcome._asdict() for signature, outcome in outcomes.items()}
        print(f"| {name} | {len(outcomes) - len(wrong)} of {len(outcomes)} | {seconds:.1f} |", flush=True)
    if options.save is not None:
        recorder.to_run().save(options.save)


if __name__ == "__main__":
    main()
