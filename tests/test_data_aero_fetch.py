"""Fetching runs: a server of this test serves as Hugging Face and S3 do, and breaks off as networks do."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from launch import exit_status

from data.aero import fetch

FILES = {f"run_{i}/{name.format(i=i)}" for i in (1, 2) for name in fetch.WHAT["surface"]}


class _Store(BaseHTTPRequestHandler):
    """``files`` {path: bytes}; ``breaks`` {path: how often an answer ends half-way}; ``lies`` {path: stated sha256}."""

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body):
        store, path = self.server, self.path.removeprefix("/moved")
        data = store.files.get(path)
        if data is None:
            self.send_error(404)
            return
        if path.endswith(".vtp") and not self.path.startswith("/moved"):  # a large file: its hash, then elsewhere
            self.send_response(302)
            self.send_header("Location", "/moved" + path)
            self.send_header("X-Linked-Etag", f'"{store.lies.get(path) or hashlib.sha256(data).hexdigest()}"')
            self.end_headers()
            return
        start = int(re.findall(r"\d+", self.headers["Range"])[0]) if self.headers.get("Range") else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
        self.end_headers()
        if body:
            half = store.breaks.get(path, 0) > 0
            store.breaks[path] = store.breaks.get(path, 0) - 1
            store.log.append((path, start))
            self.wfile.write(data[start : start + (len(data) - start) // 2] if half else data[start:])
        self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def serving():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Store)
    server.files = {f"/{name}": np.random.default_rng(3).bytes(4000 + len(name)) for name in FILES}
    server.breaks, server.lies, server.log = {}, {}, []
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def here(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_files_come_whole_and_once(tmp_path, capsys):
    with serving() as (server, base):
        command = ["--runs", "1-2", "--what", "surface", "--base", base, "--out", str(tmp_path / "d")]
        fetch.main([*command, "--dry-run"])
        assert not (tmp_path / "d").exists() and not server.log
        assert hashlib.sha256(server.files["/run_1/boundary_1.vtp"]).hexdigest() in capsys.readouterr().out
        server.breaks["/run_2/boundary_2.vtp"] = 2
        fetch.main(command)
        assert here(tmp_path / "d") == FILES | {"fetched.jsonl"}
        starts = [start for path, start in server.log if path == "/run_2/boundary_2.vtp"]
        assert len(starts) == 3 and 0 == starts[0] < starts[1] < starts[2]
        known = {e["name"]: e for e in map(json.loads, (tmp_path / "d/fetched.jsonl").read_text().splitlines())}
        for name in FILES:
            data = (tmp_path / "d" / name).read_bytes()
            assert data == server.files[f"/{name}"] and known[name]["sha256"] == hashlib.sha256(data).hexdigest()
        server.log.clear()
        (tmp_path / "d/run_1/geo_ref_1.csv").write_bytes(b"torn")
        fetch.main(command)
        assert [path for path, _ in server.log] == ["/run_1/geo_ref_1.csv"]


def test_what_does_not_come_is_named_and_the_rest_goes_on(tmp_path, capsys):
    with serving() as (server, base):
        command = ["--runs", "1", "2", "7", "--what", "surface", "--base", base, "--out", str(tmp_path), "--tries", "1"]
        server.lies["/run_1/boundary_1.vtp"] = "0" * 64
        server.breaks["/run_2/geo_ref_2.csv"] = 1
        assert exit_status(fetch.main, command) == 2
        out, err = capsys.readouterr()
        assert "missing in the store: run_7/boundary_7.vtp" in out and "5 files are not in the store and 2" in err
        assert "do not have the sha256" in out and "geo_ref_2.csv: failed" in out
        left = FILES - {"run_1/boundary_1.vtp", "run_2/geo_ref_2.csv"}
        assert here(tmp_path) == left | {"fetched.jsonl", "run_2/geo_ref_2.csv.partial"}
        server.lies.clear()
        fetch.main([*command[:3], *command[4:]])
        assert ("/run_2/geo_ref_2.csv", (4000 + len("run_2/geo_ref_2.csv")) // 2) in server.log


def test_runs_are_numbers_ranges_or_a_split(tmp_path, capsys):
    def chosen(*words):
        return fetch._runs(fetch.parser().parse_args([*words, "--out", str(tmp_path)]))

    assert chosen("--runs", "3-5", "4", "9") == [3, 4, 5, 9]
    assert len(chosen("--split", "official")) == 484
    assert exit_status(fetch.main, ["--runs", "one", "--out", str(tmp_path)]) == 2
    assert "'one' is no run number" in capsys.readouterr().err
