"""A gateway's metrics as numbers, by name and labels as they are spelled."""

import re

import httpx

from tandem.testing import LocalCluster

Samples = dict[str, float]


async def read_samples(cluster: LocalCluster) -> Samples:
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        text = (await http.get("/metrics")).text
    return {name: float(value) for name, value in re.findall(r"^(tandem_\S+) (\S+)$", text, re.MULTILINE)}


def grown(before: Samples, after: Samples) -> Samples:
    """By how much each sample has, a new one from 0."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        value
        for sample, value in samples.items()
        if sample.partition("{")[0] == name and all(label in sample for label in wanted)
    )
