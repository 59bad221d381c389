"""The channels that an archive can hold: one table that builders, readers and synthetic storms share."""

from dataclasses import dataclass

RADAR_FLOOR = -10.0  # dBZ written where the radar looked and saw nothing


@dataclass(frozen=True)
class Channel:
    """One channel of an archive; ``floor`` is the value that means "observed, and nothing there".

    ``log``: counts without an upper end, of which a model sees log(1 + value); statistics are of that, too.
    ``model``: not observed, but what a weather model says, for a time and known from a time on.
    """

    name: str
    units: str
    long_name: str
    floor: float | None = None
    log: bool = False
    model: bool = False


_ABI_UM = (0.47, 0.64, 0.86, 1.37, 1.6, 2.2, 3.9, 6.2, 6.9, 7.3, 8.4, 9.6, 10.3, 11.2, 12.3, 13.3)


def abi_channel(band):
    """The channel of ABI band 1..16: reflectance ``c01``..``c06``, brightness temperature ``bt07``..``bt16``."""
    if band <= 6:
        return Channel(f"c{band:02d}", "1", f"ABI reflectance at {_ABI_UM[band - 1]} um, times cos(solar zenith)")
    return Channel(f"bt{band:02d}", "K", f"ABI brightness temperature at {_ABI_UM[band - 1]} um")


CHANNELS = {
    channel.name: channel
    for channel in (
        Channel("refc", "dBZ", "composite radar reflectivity", RADAR_FLOOR),
        Channel("refb", "dBZ", "base radar reflectivity", RADAR_FLOOR),
        Channel("glm", "count", "lightning events per cell and step", 0.0, log=True),
        Channel("cth", "m", "cloud top height, 0 where clear", 0.0),
        Channel("rain", "mm", "rain of the past hour", 0.0),
        *(abi_channel(band) for band in range(1, 17)),
        Channel("z500", "m2 s-2", "geopotential at 500 hPa, of a weather model", model=True),
        Channel("u500", "m s-1", "eastward wind at 500 hPa, of a weather model", model=True),
        Channel("v500", "m s-1", "northward wind at 500 hPa, of a weather model", model=True),
        Channel("cape", "J kg-1", "convective available potential energy, of a weather model", 0.0, model=True),
        Channel("nwp_refc", "dBZ", "composite reflectivity of a weather model", RADAR_FLOOR, model=True),
    )
}
