// The two roundings that a weighted sum in a bf16 model needs, exact to the bit.

const float = new Float32Array(1);
const bits = new Uint32Array(float.buffer);
const double = new Float64Array(1);
const words = new BigUint64Array(double.buffer);

/** The nearest bfloat16, ties to even, as a number. */
export function bf16(value) {
  float[0] = value;
  if (Number.isNaN(float[0])) return NaN;
  const u = bits[0];
  bits[0] = (u + 0x7fff + ((u >>> 16) & 1)) & 0xffff0000;
  return float[0];
}

/** a * b + c of float32 numbers, rounded once to float32; a * b must have at most 53 bits, as here. */
export function fma(a, b, c) {
  const product = a * b;
  const sum = product + c;
  const back = sum - product;
  const error = product - (sum - back) + (c - back);
  double[0] = sum;
  // Round the sum to odd, so that the second rounding sees on which side of a tie the exact result lies.
  if (error !== 0 && Number.isFinite(sum) && (words[0] & 1n) === 0n) words[0] += error > 0 === sum > 0 ? 1n : -1n;
  return Math.fround(double[0]);
}
