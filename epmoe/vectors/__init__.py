"""Golden vectors: inputs and the reference's results as files that any language can read.

`epmoe vectors DIR` writes, for each vector,
- `NAME.bin`: arrays one after another, little-endian, C order, each at a multiple of 64 bytes;
- `NAME.json`: the manifest, one array a line with rank, shape, dtype, offset, bytes, CRC-32 and SHA-256;
- `NAME.npz`: the same arrays for NumPy; types that NumPy does not know are unsigned integers of their width.

The files have the same bytes on every machine and with every version of NumPy and Python. Inputs are made of integers
(epmoe.check.random_bits), results are defined to the bit, and zip members carry no dates. SHA256SUMS in this package
has their hashes in the form that `sha256sum -c` reads. tests/vectors/read_vector.c reads them without Python.
"""
