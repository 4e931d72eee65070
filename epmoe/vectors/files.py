"""Writes one vector's arrays as raw binary with a manifest, and as .npz, byte for byte the same everywhere."""

import hashlib
import json
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401     (names its types for np.dtype)
import numpy as np

ALIGNMENT = 64
FORMAT = "epmoe vectors 1"
# ml_dtypes types, as NumPy's file format can hold them
_PLAIN = {"bfloat16": "<u2", "float8_e4m3fn": "|u1", "float8_e8m0fnu": "|u1", "float4_e2m1fn": "|u1", "bool": "|u1"}


@dataclass(frozen=True)
class Array:
    """One array of a rank. `side` is "input", "output" or "expert" (the experts' results, the input of combine)."""

    name: str
    side: str
    rank: int
    values: np.ndarray

    @property
    def key(self):
        """Its name in the file, including the rank."""
        return f"{self.name}.rank{self.rank}"

    @property
    def plain(self):
        """The values in a little-endian type that NumPy's file format has."""
        values = np.ascontiguousarray(self.values)
        if values.dtype.name in _PLAIN:
            return values.view(_PLAIN[values.dtype.name])
        return values.astype(values.dtype.newbyteorder("<"), copy=False)


def file_name(family, case):
    """The name of a vector: the family and the words of the case, with underscores."""
    words = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in case).split()
    return "_".join([family, *words])


def one_nan(sums):
    """Sums, over ranks, with every NaN replaced by the positive one. Which NaN a sum gives depends on the machine."""
    return [np.where(np.isnan(of_rank), np.array(np.nan, of_rank.dtype), of_rank) for of_rank in sums]


def write(folder, name, about, arrays):
    """Write NAME.bin, NAME.json and NAME.npz into folder. about: a dict of plain values, repeated in the manifest."""
    folder, blob, lines = Path(folder), bytearray(), []
    for array in arrays:
        blob += bytes(-len(blob) % ALIGNMENT)
        data = array.plain.tobytes()
        entry = dict(
            name=array.name,
            rank=array.rank,
            side=array.side,
            dtype=array.values.dtype.name,
            shape=list(array.values.shape),
            offset=len(blob),
            nbytes=len(data),
            crc32=zlib.crc32(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )
        lines.append(json.dumps(entry))
        blob += data
    head = {
        "format": FORMAT,
        "name": name,
        "file": f"{name}.bin",
        "nbytes": len(blob),
        "sha256": hashlib.sha256(blob).hexdigest(),
        **about,
    }
    text = ["{"] + [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()] + [' "arrays": [']
    text += [f"  {line}{',' if line is not lines[-1] else ''}" for line in lines] + [" ]", "}", ""]
    (folder / f"{name}.bin").write_bytes(blob)
    (folder / f"{name}.json").write_bytes("\n".join(text).encode("ascii"))
    _write_npz(folder / f"{name}.npz", arrays)


def _write_npz(path, arrays):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for array in arrays:
            member = zipfile.ZipInfo(f"{array.key}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.create_system = 3  # otherwise it records the system on which it was written
            member.external_attr = 0o644 << 16
            archive.writestr(member, _npy(array.plain))


def _npy(values):
    """The .npy form, version 1.0. The header is written here so that it cannot change with NumPy."""
    shape = f"({', '.join(map(str, values.shape))}{',' if values.ndim == 1 else ''})"
    header = f"{{'descr': '{values.dtype.str}', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(10 + len(header) + 1) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1") + values.tobytes()


def read(folder, name):
    """(manifest, {key: array}) of a vector, from its manifest and binary. dtypes are as they were written."""
    manifest = json.loads((Path(folder) / f"{name}.json").read_text("ascii"))
    blob = (Path(folder) / manifest["file"]).read_bytes()
    arrays = {}
    for entry in manifest["arrays"]:
        data = blob[entry["offset"] : entry["offset"] + entry["nbytes"]]
        values = np.frombuffer(data, np.dtype(entry["dtype"])).reshape(entry["shape"])
        arrays[Array(entry["name"], entry["side"], entry["rank"], values).key] = values
    return manifest, arrays
