"""Each task prints its environment; the chief of parameter servers ends when all others have, which wait for it."""

import json
import os
import signal
import socket
import sys
import time

config = json.loads(os.environ["TF_CONFIG"])
cluster, role = config["cluster"], config["task"]["type"]
print(json.dumps(dict(os.environ)), flush=True)
if sys.argv[1:] == ["once"] and "attempt_2" not in os.environ["TFDIST_TASK_DIR"]:
    sys.exit(3)
if "ps" in cluster and role != "evaluator":
    host, _, port = cluster["chief"][0].rpartition(":")
    if role == "chief":
        with socket.create_server(("", int(port)), reuse_port=True) as server:
            for _ in (*cluster["ps"], *cluster["worker"]):
                server.accept()
    else:
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                break
            except OSError:  # the chief has not begun to listen, and nothing announces when it has
                time.sleep(0.05)
        signal.pause()
