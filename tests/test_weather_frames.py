"""What ranks read of an archive: their own part and no more, ahead of time or not, whole fields if put together."""

import numpy as np
import pytest
import torch

from apps.weather import dataset
from apps.weather.dataset import Frames
from apps.weather.facts import Facts
from apps.weather.forecast import find_start
from apps.weather.policy import KINDS, Policy
from core.errors import InputError
from data.sampler import DomainSampler
from data.weather.archive import WeatherReader
from data.weather.channels import CHANNELS
from data.weather.grid import hrrr_crop
from data.weather.splits import date_splits
from data.weather.writer import write_archive

SHAPE, FRAMES = (32, 512), 8


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Noise on 32 x 512 points; the last half of frame 5 has no radar, frame 6 none at all; ground and radars known."""
    path, rng = tmp_path_factory.mktemp("frames") / "a.zarr", np.random.default_rng(5)
    fields = rng.normal(size=(FRAMES, 2, *SHAPE)).astype(np.float32)
    fields[:, 1] = rng.poisson(3, (FRAMES, *SHAPE))
    fields[5, 0, 16:], fields[6, 0] = np.nan, np.nan
    times = np.datetime64("2020-01-01") + np.arange(FRAMES) * np.timedelta64(10, "m")
    static = {"topography": (rng.uniform(0, 2000, SHAPE), {"units": "m"})}
    splits = date_splits(("2020-01-01", "2020-01-02"), ("2020-02-01",) * 2, ("2020-03-01",) * 2)
    channels = [CHANNELS["refc"], CHANNELS["glm"]]
    write_archive(path, hrrr_crop(1, slice(0, 32), slice(0, 512)), channels, times, iter(fields), splits, static=static,
                  attrs={"step_minutes": 10})  # fmt: skip
    return path


def read_on_ranks(meshes, path, name):
    """Fields and conditions of a sample, put together, and the bytes that this rank fetched for the fields."""
    mesh, reader = meshes[name], WeatherReader(path)
    frames = Frames(reader, Facts.of(reader, 2), mesh, 4)
    before = reader.bytes_read
    frames.observed(1)
    nbytes = reader.bytes_read - before
    batch = frames.batch([2])
    return nbytes, batch.conditions.full_tensor().numpy(), frames.observed(3).values.full_tensor().numpy()


@pytest.mark.parametrize("name", ["4", "2x2"])
def test_ranks_read_their_own_part(pool, archive, name):
    found = pool.run(read_on_ranks, str(archive), name)
    reader = WeatherReader(archive)
    whole = reader.read("3", "fields", (slice(None),) * 3)
    values = found[0][2][0]
    mean, std = reader.mean, reader.std
    assert np.allclose(values[0], (whole[0] - mean[0]) / std[0], atol=1e-5)
    assert np.allclose(values[1], (np.log1p(whole[1]) - mean[1]) / std[1], atol=1e-5)
    fresh = WeatherReader(archive)
    for array in ("fields", "valid"):
        fresh.read("1", array, (slice(None),) * 3)
    index = 2 * (32 * 16 + 4)  # of 8 x 4 chunks and a checksum, twice
    total = sum(nbytes for nbytes, *_ in found)
    assert total - 4 * index == fresh.bytes_read - index  # every chunk once, by one rank
    assert all(nbytes < 0.3 * fresh.bytes_read + index for nbytes, *_ in found)
    conditions = found[0][1]
    ground = reader.read("0", "topography", (slice(None),) * 2)
    assert conditions.shape[1] == 2 * 2 * 2 + 4 + 1 and np.allclose(conditions[0, -1], ground / 1e3, atol=1e-6)
    assert all(np.array_equal(other[1], conditions) for other in found)


@pytest.fixture
def frames(archive, single_rank):
    reader = WeatherReader(archive)
    return lambda **options: Frames(reader, Facts.of(reader, 2), single_rank, 4, **options)


@pytest.fixture(scope="module")
def single_rank():
    from core import DistributedManager

    DistributedManager.initialize()
    yield DistributedManager().initialize_mesh((1,), ("domain",))
    DistributedManager.cleanup()


def test_policies_for_what_is_missing(frames):
    assert frames().starts() == [1, 2, 3, 4, 5, 6]
    assert frames(policy=Policy("reject")).starts() == [1, 2, 3, 4]
    assert frames(policy=Policy("reject", 0.6)).starts() == [1, 2, 3]
    with pytest.raises(InputError, match="a.zarr, variable refc: only 0% was observed at 2020-01-01T01:00:00, 50%"):
        frames(policy=Policy("refuse")).starts()
    assert frames(policy=Policy("refuse", 0.0)).starts() == [1, 2, 3, 4, 5, 6]


def test_a_forecast_starts_where_the_policy_allows(archive):
    reader = WeatherReader(archive)
    facts, refused = Facts.of(reader, 2), "a.zarr, variable refc: only 0% was observed at 2020-01-01T01:00:00"
    starts = {kind: lambda text, kind=kind: find_start(reader, facts, text, Policy(kind)) for kind in KINDS}
    assert starts["mask"]("latest") == starts["mask"]("2020-01-01T01:10") == 7
    assert starts["reject"]("latest") == 5  # half of it was seen
    for kind, text in (("refuse", "latest"), ("refuse", "2020-01-01T01:10"), ("reject", "2020-01-01T01:10")):
        with pytest.raises(InputError, match=refused):
            starts[kind](text)
    with pytest.raises(InputError, match="no 2 successive frames of which enough was observed"):
        find_start(reader, facts, "latest", Policy("reject", 1.1))


def test_log_channels_come_back_in_their_units(frames, archive):
    data = frames()
    stored = WeatherReader(archive).read("2", "fields", (slice(None),) * 3)
    assert np.allclose(data.physical(data.observed(2).values).full_tensor()[0], stored, atol=1e-4)
    low = data.at_least_floor(torch.full((1, 2, 1, 1), -99.0))
    assert data.physical(low).ravel().tolist() == pytest.approx([-10.0, 0.0], abs=1e-5)


def test_reading_ahead_gives_the_same_and_counts_it(frames, archive, monkeypatch):
    monkeypatch.setattr(dataset, "WORTH_READING_AHEAD", 0)
    plain, ahead = frames(), frames()
    assert len(plain._static) == len(ahead._static) == 1 and len(ahead.reader.times) == FRAMES  # read once
    before = ahead.reader.bytes_read
    ahead.expect([3, 4])
    ahead.expect([4])
    assert len(ahead._ahead._coming) == 2 * 4  # frames 2 to 5, fields and valid, each once
    batch = ahead.batch([3, 4])
    fetched = ahead._ahead.bytes_read - before
    assert ahead.reader.bytes_read == before and not ahead._ahead._coming  # workers read everything
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(batch, plain.batch([3, 4])))
    assert plain.reader.bytes_read - before == fetched
    monkeypatch.setattr(dataset, "READ_AHEAD_BYTES", 3 * SHAPE[0] * SHAPE[1] * 2 * 5)
    ahead.expect([6])  # frames 5, 6 and 7, of which 5 is kept
    assert len(ahead._ahead._coming) == 2 * 2
    ahead._ahead.expect("99", "fields", (slice(0, 1),) * 3)
    with pytest.raises(InputError, match="no sample 99"):  # errors of workers arrive
        ahead._ahead.read("99", "fields", (slice(0, 1),) * 3)
    ahead._ahead.close()


def test_what_comes_next_is_known_before(archive):
    sampler = DomainSampler(5, 4, groups=2, group=1, seed=3)
    for _ in range(3):
        coming = sampler.coming()
        assert coming == sampler.next()
    state = sampler.state_dict()
    assert (state["epoch"], state["used"]) == (2, 2)
    other = DomainSampler(5, 3, seed=3)
    other.load_state_dict(state)
    assert other.coming()[0][1] == 12
