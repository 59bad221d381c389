"""Where the sun stands: the one input that tells a model that it is night."""

import numpy as np


def cos_zenith(latitude, longitude, time):
    """Cosine of the solar zenith angle, same shape as ``latitude``; degrees in, good to about 0.01.

    Source: Cooper's declination and the equation of time of Spencer (1971).
    """
    days = (np.datetime64(time, "s") - np.datetime64(time, "Y")) / np.timedelta64(86400, "s")
    year = 2 * np.pi * (days - 0.5) / 365
    decline = np.radians(23.45) * np.sin(2 * np.pi * (284 + days + 1) / 365)
    minutes = 229.18 * (
        0.000075 + 0.001868 * np.cos(year) - 0.032077 * np.sin(year)
        - 0.014615 * np.cos(2 * year) - 0.040849 * np.sin(2 * year)
    )  # fmt: skip
    hour = np.radians(360 * (days % 1) + np.asarray(longitude) + minutes / 4 - 180)
    lat = np.radians(latitude)
    return np.sin(lat) * np.sin(decline) + np.cos(lat) * np.cos(decline) * np.cos(hour)
