"""Fetching from a bucket: a server of this test lists and serves as S3 does, and breaks off as networks do."""

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from launch import exit_status
from weather_files import GLM_G19, hrrr_keys, write_grib

from core.errors import InputError
from data import download
from data.weather import fetch
from data.weather.fields import read_field
from data.weather.files import find_files
from data.weather.streams import RADAR, satellite_of, stamp

GOES = "/noaa-goes19/"
MRMS = "/noaa-mrms-pds/"
KEYS = hrrr_keys(slice(0, 15), slice(0, 20))
START = (20250501, 1800)
MESSAGES = [("vis", KEYS, START, 1, None), ("refc", KEYS, START, 1, None), ("gh", KEYS, START, 1)]
SPAN = ["--start", "2025-05-01T18:00", "--end", "2025-05-01T18:30"]


class _Bucket(BaseHTTPRequestHandler):
    """``files`` {path: bytes}; ``breaks`` {path: how often the answer ends half-way}; pages of 5 keys."""

    def do_GET(self):
        url = urlsplit(self.path)
        self.server.log.append((url.path, self.headers.get("Range")))
        if "list-type" in (query := parse_qs(url.query)):
            return self._list(url.path, query)
        data = self.server.files[url.path]
        start, *end = map(int, re.findall(r"\d+", self.headers.get("Range") or "0"))
        data = data[: end[0] + 1] if end else data
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        half = self.server.breaks.get(url.path, 0) > 0
        if half:
            self.server.breaks[url.path] -= 1
        self.wfile.write(data[start : start + (len(data) - start) // 2] if half else data[start:])
        self.close_connection = True

    def _list(self, root, query):
        prefix, first = query["prefix"][0], query.get("continuation-token", [""])[0]
        keys = sorted(k[len(root) :] for k in self.server.files if k.startswith(root + prefix))
        page = [key for key in keys if key > first][:5]
        items = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(self.server.files[root + key])}</Size><ETag>&quot;"
            f"{hashlib.md5(self.server.files[root + key]).hexdigest()}&quot;</ETag></Contents>"
            for key in page
        )
        more = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if page and page[-1] != keys[-1] else ""
        text = f'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{items}{more}</ListBucketResult>'
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download.time, "sleep", lambda seconds: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    server.files, server.breaks, server.log = {}, {}, []
    for minute in range(0, 60, 2):  # composites every two minutes, 41 s after
        name = f"MRMS_MergedReflectivityQCComposite_00.50_20250501-18{minute:02d}41.grib2.gz"
        server.files[f"{MRMS}CONUS/{RADAR['refc']}/20250501/{name}"] = f"radar {minute}".encode()
    for minute in (1, 6, 11, 26):  # the scans of 18:16 and 18:21 never came
        name = f"OR_ABI-L2-MCMIPC-M6_G19_s202512118{minute:02d}176_e20251211802549_c2025121180305.nc"
        server.files[f"{GOES}ABI-L2-MCMIPC/2025/121/18/{name}"] = f"image {minute}".encode() * 1000
    for minute, band in ((1, 8), (1, 13), (11, 13)):
        name = f"OR_ABI-L2-CMIPC-M6C{band:02d}_G19_s202512118{minute:02d}176_e20251211802549_c2025121180305.nc"
        server.files[f"{GOES}ABI-L2-CMIPC/2025/121/18/{name}"] = b"band" * band
    name = "OR_GLM-L2-LCFA_G19_s20251211751400_e20251211752000_c20251211752018.nc"
    server.files[f"{GOES}GLM-L2-LCFA/2025/121/17/{name}"] = GLM_G19.read_bytes()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def _run(server, out, *more):
    base = f"http://127.0.0.1:{server.server_address[1]}"
    urls = ["--goes-url", base + "/noaa-goes{satellite}", "--mrms-url", base + MRMS, "--hrrr-url", base + "/hrrr",
            "--gfs-url", base + "/gfs"]  # fmt: skip
    return exit_status(fetch.main, [*SPAN, "--out", str(out), *urls, *more])


def _minutes(folder):
    return sorted(str(stamp(path.name))[14:16] for path in find_files(folder, "*.grib2.gz", "*.nc"))


def test_fetch_takes_the_scans_nearest_to_each_step(server, tmp_path, capsys):
    assert _run(server, tmp_path, "--abi", "MCMIPC", "CMIPC", "--bands", "13", "--mrms", "refc", "--glm") == 0
    said = capsys.readouterr().out
    assert "MCMIPC: 2 files" in said and "refc: 3 files" in said and "GLM: 1 files" in said  # GLM from 17:50
    assert _minutes(tmp_path / "mrms") == ["00", "10", "20"]
    files = json.loads((tmp_path / "fetched.jsonl").read_text().splitlines()[0])
    assert files["sha256"] == hashlib.sha256((tmp_path / files["name"]).read_bytes()).hexdigest()


def test_dry_run_fetches_nothing(server, tmp_path, capsys):
    assert _run(server, tmp_path / "new", "--abi", "MCMIPC", "--dry-run") == 0
    assert "2 files" in capsys.readouterr().out and not (tmp_path / "new").exists()


def test_a_gap_is_told(server, tmp_path, capsys):
    assert _run(server, tmp_path, "--abi", "CMIPC", "--bands", "8", "13") == 0
    assert "3 files" in (said := capsys.readouterr().out) and "no file for 1 steps: 2025-05-01T18:20" in said


def test_broken_lines_go_on_where_they_broke(server, tmp_path):
    path = next(k for k in server.files if "MCMIPC" in k and "1811" in k)
    server.breaks[path] = 2
    assert _run(server, tmp_path, "--abi", "MCMIPC") == 0
    size = len(server.files[path])
    asked = [how for where, how in server.log if where == path]
    assert asked == [None, f"bytes={size // 2}-", f"bytes={size // 2 + (size - size // 2) // 2}-"]
    assert (tmp_path / "abi" / path.removeprefix(GOES)).read_bytes() == server.files[path]


def test_a_second_run_fetches_what_is_missing_or_damaged(server, tmp_path, capsys):
    path = next(k for k in server.files if "MCMIPC" in k and "1811" in k)
    server.breaks[path] = 99
    assert _run(server, tmp_path, "--abi", "MCMIPC") == 2
    assert "1 of 2 files did not come" in capsys.readouterr().err
    assert len(find_files(tmp_path, "*.nc")) == 1 and len(list(tmp_path.rglob("*.partial"))) == 1
    del server.breaks[path]
    server.log.clear()
    with open(tmp_path / "fetched.jsonl", "a") as file:
        file.write('{"name": "torn')  # as a killed run leaves it
    find_files(tmp_path, "*s20251211801*")[0].write_bytes(b"short")
    assert _run(server, tmp_path, "--abi", "MCMIPC") == 0
    assert "2 to fetch" in capsys.readouterr().out and not list(tmp_path.rglob("*.partial"))
    for key in (k for k in server.files if "MCMIPC" in k and re.search("s202512118[01]1", k)):
        assert (tmp_path / "abi" / key.removeprefix(GOES)).read_bytes() == server.files[key]
    assert _run(server, tmp_path, "--abi", "MCMIPC") == 0 and "0 to fetch" in capsys.readouterr().out


def test_single_fields_of_hrrr(server, tmp_path, capsys):
    made = (write_grib(tmp_path / "m", np.arange(300.0) + n, *how) for n, how in enumerate(MESSAGES))
    parts = [path.read_bytes() for path in made]
    key = "/hrrr/hrrr.20250501/conus/hrrr.t18z.wrfsfcf01.grib2"
    server.files[key], first = b"".join(parts), np.cumsum([0, *map(len, parts)])
    labels = ("VIS:surface", "REFC:entire atmosphere", "HGT:500 mb")
    lines = (f"{n + 1}:{first[n]}:d=2025050118:{label}:1 hour fcst:" for n, label in enumerate(labels))
    server.files[key + ".idx"] = "\n".join(lines).encode()
    fields = ["--hrrr", "HGT:500 mb", "REFC:entire atmosphere", "--hrrr-leads", "1"]
    assert _run(server, tmp_path, *fields) == 0
    [path] = (tmp_path / "hrrr").rglob("*.grib2")
    assert path.read_bytes() == parts[2] + parts[1]
    field = read_field(path, ("gh",), 500)
    assert field.values.ravel()[0] == pytest.approx(2, abs=0.01) and field.times[0] == np.datetime64("2025-05-01T19:00")
    assert _run(server, tmp_path, *fields) == 0 and "HRRR: 1 files, of which 0 to fetch" in capsys.readouterr().out
    quarters = key.replace("wrfsfc", "wrfsubh")
    server.files[quarters] = parts[1] + parts[1]
    lines = (f"{n + 1}:{n * len(parts[1])}:d=2025050118:{labels[1]}:{15 * n + 15} min fcst:" for n in range(2))
    server.files[quarters + ".idx"] = "\n".join(lines).encode()
    assert _run(server, tmp_path, "--hrrr", labels[1], "--hrrr-leads", "1", "--hrrr-subhourly") == 0
    [path] = (tmp_path / "hrrr").rglob("*wrfsubh*")
    assert path.read_bytes() == server.files[quarters]
    world = "/gfs/gfs.20250501/18/atmos/gfs.t18z.pgrb2.0p25.f006"
    server.files |= {world: parts[2], f"{world}.idx": b"1:0:d=2025050118:HGT:500 mb:6 hour fcst:"}
    assert _run(server, tmp_path, "--gfs", "HGT:500 mb", "--gfs-leads", "6") == 0
    [path] = (tmp_path / "gfs").rglob("*.grib2")
    assert path.read_bytes() == parts[2] and path.name == "gfs.t18z.pgrb2.0p25.f006.HGT-500-mb.grib2"
    assert _run(server, tmp_path, "--hrrr", "TMP:surface", "--hrrr-leads", "1") == 2
    assert "the index has no TMP:surface" in capsys.readouterr().out


def test_bytes_that_the_bucket_does_not_list_are_refused(server, tmp_path, monkeypatch):
    server.files[f"{GOES}x.nc"] = b"evil"
    url = f"http://127.0.0.1:{server.server_address[1]}{GOES}x.nc"
    item = download.Remote(url, 4, {"md5": hashlib.md5(b"good").hexdigest()})
    with pytest.raises(InputError, match="x.nc: cannot be fetched .the bytes that came do not have the md5"):
        download.download(item, tmp_path / "x.nc")
    assert list(tmp_path.iterdir()) == []


def test_faults_are_named(server, tmp_path, capsys):
    assert _run(server, tmp_path) == 2 and "Name --abi, --mrms, --glm, --hrrr or --gfs" in capsys.readouterr().err
    assert (
        _run(server, tmp_path, "--abi", "MCMIPC", "--end", "2025-05-01") == 2 and "ends at" in capsys.readouterr().err
    )
    dead = ["--goes-url", "http://127.0.0.1:9/{satellite}", "--mrms-url", "x"]
    assert exit_status(fetch.main, [*SPAN, "--out", str(tmp_path), "--glm", *dead]) == 2
    assert "127.0.0.1:9/19/?list-type" in capsys.readouterr().err
    with pytest.raises(InputError, match="GOES-19 followed GOES-16 on 2025-04-07"):
        satellite_of("east", np.datetime64("2025-04-06", "s"), np.datetime64("2025-04-08", "s"))
    assert satellite_of("west", np.datetime64("2022-04-06", "s"), np.datetime64("2022-05-06", "s")) == "17"
