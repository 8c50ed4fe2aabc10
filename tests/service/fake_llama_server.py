"""A tiny llama-server with fault switches, for tests of what watches it. The standard library alone.

Installed under the name ``llama-server`` in a made-up engine; see ``service_harness.py``. It takes llama-server's own
arguments and answers /health, /props, /moe/stats, /v1/chat/completions, /tokenize, /completion (streamed). Switches come in the environment variable
FAKE_LLAMA, separated by commas:

    slow=S            503 on /health for S seconds, then ready
    never-healthy     503 for ever
    never-listens     runs, opens no port
    hangs             accepts connections and never answers
    dies-at-once=C    prints a few lines and exits with code C
    dies-by=N         kills itself with signal N before it is ready
    dies-later=S      exits with code 9, S seconds after it became ready
    ignores-sigterm
    busy              goes on after the first SIGTERM, exits with code 1 on the second, as llama-server with a long answer
    prints-much=M     prints M MiB before it is ready
    unknown-arch      gives up as llama-server does on an architecture it does not know
    knows-not=FLAG    gives up as llama-server does on an argument that it does not know, where it is given
    refuses           gives up as moestream's llama-server does on settings it refuses
    no-stats          404 on /moe/stats, as stock llama-server
    streaming-off
    takes=M           says that it takes M MiB of memory
    on-card           says that a card looks after its slots, with what the demo model then takes of locked RAM
    sleeps               has freed its model, as llama-server after --sleep-idle-seconds
    records=PATH      writes this file's content where --moe-trace says, as a llama-server that has computed something
    needs-key=K       401 on everything but /health without this API key
    stock-only        all of these only without --moe-slots
  in streamed answers:
    second-answer     those below only from a process's second answer on
    wrong-token=K     the K-th token is another one
    dies-in-answer=K, hangs-in-answer=K, fails-in-answer=K   ends with code 9, hangs, answers with an error, behind the K-th token
    short-answer=K    ends the answer behind the K-th token
    slow-answer=S     S seconds a token
"""

import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def switches():
    pairs = [part.partition("=") for part in os.environ.get("FAKE_LLAMA", "").split(",") if part]
    return {name: value for name, _, value in pairs}


def value_of(flag, default=None):
    return sys.argv[sys.argv.index(flag) + 1] if flag in sys.argv else default


FAULTS = switches()
if "stock-only" in FAULTS and value_of("--moe-slots"):
    FAULTS = {}
READY_AT = None
N_ANSWERS = 0


def log(text):
    print(text, file=sys.stderr, flush=True)


def stats():
    if "streaming-off" in FAULTS or "sleeps" in FAULTS:
        return {"schema": "moestream/stats/1", "streaming": False}
    slots = value_of("--moe-slots")
    n_slots = 12 if slots == "auto" else 64 if slots == "all" else int(slots)
    layer = {"slots": n_slots, "hits": 30, "misses": 10, "evictions": 2, "bytes_needed": 40 << 20,
             "bytes_read": 10 << 20, "stall_us": 1500}  # fmt: skip
    total = int(FAULTS.get("takes", 16)) << 20
    on_card = {}
    if "on-card" in FAULTS:
        on_card = {"placement": "CUDA0", "gpu_path": {"in_force": "mailbox", "reason": ""}}
    return {
        "schema": "moestream/stats/1", "streaming": True, "n_layer_moe": 8, "n_expert": 64, "n_expert_used": 6,
        "slots": n_slots, "policy": value_of("--moe-policy", "lru"),
        "io": {"mode": "buffered", "requested": value_of("--moe-io", "auto"), "reason": "", "threads": 4, "backend": "threads", "in_flight": 4},
        "overlap": True, "placement": "cpu", "kernels": {"experts": "repacked", "dense": "plain", "same_bits_as": "stock llama.cpp"},
        "memory": {"pool_bytes": 4 << 20, "staging_bytes": 1 << 20, "bounce_bytes": 0, "dense_bytes": 8 << 20,
                   "kv_bytes": 2 << 20, "compute_bytes": 1 << 20, "total_bytes": total,
                   **({"ram_bytes": 8 * 64 * 62208, "guess_bytes": 0, "device_bytes": 15 << 20} if on_card else {})},
        "totals": {"hits": 240, "misses": 80, "evictions": 16, "bytes_needed": 320 << 20, "bytes_read": 80 << 20,
                   "stall_us": 12000, "tokens_decode": 50, "read_errors": 0},
        "layers": [{"layer": i, **layer} for i in range(8)],
        "a_later_field": {"must": "not matter"}, **on_card,
    }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format, *args):
        log("request: " + format % args)

    def answer(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def prefixed(self):
        """Takes --api-prefix off the path; a request without it is for nobody."""
        prefix = value_of("--api-prefix", os.environ.get("LLAMA_ARG_API_PREFIX", ""))
        if not self.path.startswith(prefix + "/"):
            self.answer(404, {"error": {"code": 404}})
            return False
        self.path = self.path.removeprefix(prefix)
        return True

    def refused(self):
        key = FAULTS.get("needs-key")
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self.answer(401, {"error": {"message": "Invalid API Key"}})
            return True
        return False

    def do_GET(self):
        if "hangs" in FAULTS:
            time.sleep(3600)
        if not self.prefixed():
            return
        if self.path == "/health":
            ready = READY_AT is not None and time.monotonic() >= READY_AT
            self.answer(200 if ready else 503, {"status": "ok"} if ready else {"error": {"code": 503}})
        elif self.refused():
            return
        elif self.path == "/props":
            self.answer(200, {"total_slots": 4, "default_generation_settings": {"n_ctx": 2048},
                              "is_sleeping": "sleeps" in FAULTS})  # fmt: skip
        elif self.path == "/moe/stats" and "no-stats" not in FAULTS:
            self.answer(200, stats())
        else:
            self.answer(404, {"error": {"code": 404}})

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.prefixed() or self.refused():
            return
        if self.path == "/tokenize":
            self.answer(200, {"tokens": [1, *request["content"].encode()]})
            return
        if self.path == "/completion":
            self.stream(request["n_predict"])
            return
        if self.path != "/v1/chat/completions":
            self.answer(404, {"error": {"code": 404}})
            return
        content = "You asked: " + request["messages"][-1]["content"]
        self.answer(200, {"choices": [{"message": {"role": "assistant", "content": content}}]})

    def event(self, body):
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")
        self.wfile.flush()

    def stream(self, n_predict):
        global N_ANSWERS
        N_ANSWERS += 1
        faults = {} if "second-answer" in FAULTS and N_ANSWERS == 1 else FAULTS
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        n_tokens = int(faults.get("short-answer", n_predict))
        for n in range(1, n_tokens + 1):
            time.sleep(float(faults.get("slow-answer", 0.002)))
            token = 900 if faults.get("wrong-token") == str(n) else 100 + n
            self.event({"content": f" {token}", "tokens": [token], "stop": False, "tokens_predicted": n})
            if faults.get("dies-in-answer") == str(n):
                log("fatal: the disk went away")
                os._exit(9)
            if faults.get("hangs-in-answer") == str(n):
                time.sleep(3600)
            if faults.get("fails-in-answer") == str(n):
                self.event({"error": {"code": 500, "message": "layer 3: a read failed"}})
                return
        self.event({"content": "", "tokens": [], "stop": True, "tokens_predicted": n_tokens,
                    "timings": {"prompt_n": 8, "prompt_ms": 4.0}})  # fmt: skip


def on_sigterm_while_busy(number, frame):
    def again(number, frame):
        log("Received second interrupt, terminating immediately.")
        os._exit(1)

    signal.signal(signal.SIGTERM, again)


REFUSAL = """\
0.00.077.990 E llama_model_load: error loading model: --moe-slots auto: 6 slots take 9.5 MiB; hint: a smaller context (-c), or --moe-slots 6
0.00.078.678 E llama_model_load_from_file_impl: failed to load model
0.00.083.041 E common_fit_params: encountered an error while trying to fit params to free device memory: failed to load model
0.00.101.753 E llama_model_load: error loading model: --moe-slots auto: 6 slots take 9.5 MiB; hint: a smaller context (-c), or --moe-slots 6
0.00.101.779 E llama_model_load_from_file_impl: failed to load model
0.00.101.792 E cmn  common_init_: failed to load model 'm.gguf'
0.00.101.807 E srv    load_model: failed to load model, 'm.gguf'
0.00.101.813 I srv    operator(): operator(): cleaning up before exit...
0.00.106.712 E srv  llama_server: exiting due to model loading error"""


def main():
    global READY_AT
    log("fake llama-server " + " ".join(sys.argv[1:]))
    if "ignores-sigterm" in FAULTS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif "busy" in FAULTS:
        signal.signal(signal.SIGTERM, on_sigterm_while_busy)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "prints-much" in FAULTS:
        line = "x" * 1023
        for _ in range(int(FAULTS["prints-much"]) * 1024):
            print(line)
        sys.stdout.flush()
    if "records" in FAULTS and value_of("--moe-trace"):
        with open(FAULTS["records"], "rb") as source, open(value_of("--moe-trace"), "wb") as trace:
            trace.write(source.read())
    if "dies-at-once" in FAULTS:
        log("llama_model_load: error: the tensor data is damaged")
        log("srv: exiting due to model loading error")
        sys.exit(int(FAULTS["dies-at-once"]))
    if "unknown-arch" in FAULTS:
        log("llama_model_load: error loading model: unknown model architecture: 'marvin42'")
        sys.exit(1)
    if FAULTS.get("knows-not") in sys.argv:
        log(f"error: invalid argument: {FAULTS['knows-not']}")
        sys.exit(1)
    if "refuses" in FAULTS:
        log(REFUSAL)
        sys.exit(1)
    if "dies-by" in FAULTS:
        os.kill(os.getpid(), int(FAULTS["dies-by"]))
    if "never-listens" in FAULTS:
        time.sleep(3600)
    try:
        server = ThreadingHTTPServer((value_of("--host"), int(value_of("--port"))), Handler)
    except OSError:
        log(f"srv: couldn't bind HTTP server socket, hostname: {value_of('--host')}, port: {value_of('--port')}")
        sys.exit(1)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if "never-healthy" not in FAULTS:
        READY_AT = time.monotonic() + float(FAULTS.get("slow", 0))
    log("loading the model")
    if "dies-later" in FAULTS:
        time.sleep(max(0.0, READY_AT - time.monotonic()) + float(FAULTS["dies-later"]))
        log("fatal: the disk went away")
        os._exit(9)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
