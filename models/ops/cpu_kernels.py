"""Two small C++ kernels for decode steps on a CPU, compiled once on the machine that runs them.

Between two matrix products, which empty the caches, every small torch operator costs tens of
microseconds; a layer's attention takes about twenty of them. One call replaces them. Without a C++
compiler `compiled()` is None and the callers use torch. Knows nothing of operators or layers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "fullgraph_kv_write": [_POINTER] * 4 + [_INT] * 5,
    "fullgraph_linear": [_POINTER] * 4 + [_INT] * 4,
    "fullgraph_attend_float": [_POINTER] * 8 + [_INT] * 8 + [_FLOAT],
    "fullgraph_attend_bfloat16": [_POINTER] * 8 + [_INT] * 8 + [_FLOAT],
}
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
# What a compiler may lack is left out from the end on.
_OPTIONAL = ("-march=native", "-fopenmp")
_COMPILE_TIMEOUT_S = 120


@functools.cache
def compiled() -> ctypes.CDLL | None:
    """The compiled kernels, from the user's cache if they are there; None without a compiler."""
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++"))), None)
    if compiler is None:
        return None
    key = hashlib.sha256("\0".join((_SOURCE, *_FLAGS, *_OPTIONAL, _machine())).encode())
    try:
        folder = _cache_folder()
        file = folder / f"cpu_kernels_{key.hexdigest()[:16]}.so"
        found = _load(file) if file.exists() else None
        if found is None and _compile(compiler, folder, file):
            found = _load(file)
        return found
    except OSError:  # nowhere to write
        return None


def _load(file: Path) -> ctypes.CDLL | None:
    try:
        loaded = ctypes.CDLL(str(file))
        for name, types in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = types, None
    except (OSError, AttributeError):  # a broken file
        return None
    return loaded


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "fullgraph" / "cpu_kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _machine() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, folder: Path, file: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, built = Path(scratch, "kernels.cpp"), Path(scratch, "kernels.so")
        source.write_text(_SOURCE, encoding="utf-8")
        for count in range(len(_OPTIONAL), -1, -1):
            command = [
                *compiler.split(),
                *_FLAGS,
                *_OPTIONAL[:count],
                str(source),
                "-o",
                str(built),
            ]
            try:
                done = subprocess.run(command, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return False
            if done.returncode == 0:
                os.replace(built, file)  # atomic: another process may do the same
                return True
    return False


_SOURCE = r"""
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bfloat16 { uint16_t bits; };

inline float load(float x) { return x; }
inline float load(bfloat16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void store(float* to, float x) { *to = x; }
inline void store(bfloat16* to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  // Round to nearest, ties to even; a NaN must not round to infinity.
  to->bits = x != x ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// exp(x) for x <= 0, to 2 units in the last place: 2^n times a polynomial (Cephes, expf).
inline float exp_negative(float x) {
  x = x < -87.3f ? -87.3f : x;
  float n = std::floor(x * 1.44269504f + 0.5f);
  float r = x - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = (int32_t(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

struct Shape {
  int64_t heads, kv_heads, head_dim, page_size;
};

// A head's keys are short pieces far apart, which no hardware foresees.
constexpr int64_t AHEAD = 16;
template <class T>
inline void fetch(const T* from, int64_t dim) {
  for (int64_t byte = 0; byte < dim * int64_t(sizeof(T)); byte += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(from) + byte);
}

// What one thread works in.
template <class T>
struct Scratch {
  std::vector<const T*> keys;  // [length], each token's key
  std::vector<float> scores, query, sum;  // [group, length], [group, dim], [group, dim]
};

// One row's query heads of one kv head. HEAD_DIM 0: known only at run time.
template <class T, int HEAD_DIM>
void attend(const T* q, const T* kv, const int32_t* pages, int64_t first, int64_t end,
            int64_t kv_head, const Shape& shape, float scale, Scratch<T>& scratch, T* out) {
  const int64_t dim = HEAD_DIM ? HEAD_DIM : shape.head_dim;
  const int64_t group = shape.heads / shape.kv_heads, length = end - first;
  const int64_t token_stride = shape.kv_heads * dim, values = shape.page_size * token_stride;
  scratch.keys.clear();
  for (int64_t at = first; at < end;) {
    const int64_t page = at / shape.page_size, offset = at % shape.page_size;
    const int64_t stop = std::min(end, (page + 1) * shape.page_size);
    const T* key = kv + (pages[page] * 2 * shape.page_size + offset) * token_stride + kv_head * dim;
    for (; at < stop; ++at, key += token_stride) scratch.keys.push_back(key);
  }
  scratch.scores.resize(size_t(group * length));
  scratch.query.resize(size_t(group * dim));
  scratch.sum.assign(size_t(group * dim), 0.0f);
  const T* const* keys = scratch.keys.data();
  float *scores = scratch.scores.data(), *query = scratch.query.data(), *sum = scratch.sum.data();
  for (int64_t i = 0; i < group * dim; ++i) query[i] = load(q[i]) * scale;
  for (int64_t s = 0; s < length; ++s) {
    const T* __restrict key = keys[s];
    fetch(keys[std::min(s + AHEAD, length - 1)], dim);
    for (int64_t g = 0; g < group; ++g) {
      const float* __restrict head = query + g * dim;
      float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
      for (int64_t d = 0; d < dim; ++d) dot += head[d] * load(key[d]);
      scores[g * length + s] = dot;
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float* row = scores + g * length;
    float largest = row[0], total = 0.0f;
    for (int64_t s = 1; s < length; ++s) largest = std::max(largest, row[s]);
#pragma omp simd reduction(+ : total)
    for (int64_t s = 0; s < length; ++s) total += row[s] = exp_negative(row[s] - largest);
    const float inverse = 1.0f / total;
    for (int64_t s = 0; s < length; ++s) row[s] *= inverse;
  }
  for (int64_t s = 0; s < length; ++s) {
    const T* __restrict value = keys[s] + values;
    fetch(keys[std::min(s + AHEAD, length - 1)] + values, dim);
    for (int64_t g = 0; g < group; ++g) {
      const float weight = scores[g * length + s];
      float* __restrict head = sum + g * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) head[d] += weight * load(value[d]);
    }
  }
  for (int64_t i = 0; i < group * dim; ++i) store(out + i, sum[i]);
}

template <class T>
void attend_rows(const T* q, const T* kv, const int32_t* table, const int32_t* slots,
                 const int32_t* starts, const int32_t* lens, const int32_t* offsets, T* out,
                 int64_t rows, int64_t q_stride, int64_t table_stride, const Shape& shape,
                 int64_t window, float scale) {
  const int64_t dim = shape.head_dim, group = shape.heads / shape.kv_heads;
  int64_t seen = 0;
  for (int64_t r = 0; r < rows; ++r) seen += lens[r] == 1 ? starts[r] + 1 : 0;
  // Waking the threads costs more than a short loop.
#pragma omp parallel for collapse(2) schedule(dynamic, 1) if (seen * shape.kv_heads * dim > 65536)
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t head = 0; head < shape.kv_heads; ++head) {
      if (lens[r] != 1) continue;
      static thread_local Scratch<T> scratch;
      const int64_t end = int64_t(starts[r]) + 1;
      const int64_t first = window ? std::max<int64_t>(0, end - window) : 0;
      const T* query = q + offsets[r] * q_stride + head * group * dim;
      T* to = out + (offsets[r] * shape.heads + head * group) * dim;
      const int32_t* pages = table + slots[r] * table_stride;
      switch (dim) {
        case 64:
          attend<T, 64>(query, kv, pages, first, end, head, shape, scale, scratch, to);
          break;
        case 128:
          attend<T, 128>(query, kv, pages, first, end, head, shape, scale, scratch, to);
          break;
        default:
          attend<T, 0>(query, kv, pages, first, end, head, shape, scale, scratch, to);
      }
    }
  }
}

// ---- x @ w.T for a few rows of x: every weight is read from memory once ----

#ifdef __AVX512F__
constexpr int WIDTH = 16, OUTS = 3;
#else
constexpr int WIDTH = 8, OUTS = 1;
#endif
constexpr int64_t ROWS = 8;  // OUTS * ROWS sums fill the registers
typedef float vec __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

// y[m, n] for M_ROWS rows of x and N_OUTS rows of w, each of length k.
template <int M_ROWS, int N_OUTS>
inline void tile(const float* x, const float* w, const float* bias, float* y, int64_t k,
                 int64_t x_stride, int64_t y_stride) {
  vec sums[N_OUTS][M_ROWS] = {};
  int64_t i = 0;
  for (; i + WIDTH <= k; i += WIDTH) {
    vec weights[N_OUTS];
    for (int n = 0; n < N_OUTS; ++n) {
      weights[n] = *reinterpret_cast<const vec*>(w + n * k + i);
      __builtin_prefetch(w + (n + N_OUTS) * k + i);
    }
    for (int m = 0; m < M_ROWS; ++m) {
      vec row = *reinterpret_cast<const vec*>(x + m * x_stride + i);
#ifdef __AVX512F__
      asm("" : "+v"(row));  // or it is loaded again for every n
#endif
      for (int n = 0; n < N_OUTS; ++n) sums[n][m] += row * weights[n];
    }
  }
  for (int n = 0; n < N_OUTS; ++n) {
    for (int m = 0; m < M_ROWS; ++m) {
      float lanes[WIDTH], sum = bias ? bias[n] : 0.0f;
      std::memcpy(lanes, &sums[n][m], sizeof lanes);
#pragma omp simd reduction(+ : sum)
      for (int lane = 0; lane < WIDTH; ++lane) sum += lanes[lane];
      y[m * y_stride + n] = sum;
    }
  }
  for (; i < k; ++i)
    for (int n = 0; n < N_OUTS; ++n)
      for (int m = 0; m < M_ROWS; ++m) y[m * y_stride + n] += x[m * x_stride + i] * w[n * k + i];
}

template <int M_ROWS>
void outputs(const float* x, const float* w, const float* bias, float* y, int64_t count, int64_t k,
             int64_t x_stride, int64_t y_stride) {
  int64_t n = 0;
  for (; n + OUTS <= count; n += OUTS)
    tile<M_ROWS, OUTS>(x, w + n * k, bias ? bias + n : bias, y + n, k, x_stride, y_stride);
  for (; n < count; ++n)
    tile<M_ROWS, 1>(x, w + n * k, bias ? bias + n : bias, y + n, k, x_stride, y_stride);
}

using Outputs = void (*)(const float*, const float*, const float*, float*, int64_t, int64_t,
                         int64_t, int64_t);
constexpr Outputs OUTPUTS[ROWS] = {outputs<1>, outputs<2>, outputs<3>, outputs<4>,
                                   outputs<5>, outputs<6>, outputs<7>, outputs<8>};

}  // namespace

extern "C" {

// y [rows, outs] = x [rows, k] @ w [outs, k].T + bias [outs] or null. Strides in elements.
void fullgraph_linear(const float* x, const float* w, const float* bias, float* y, int64_t rows,
                      int64_t outs, int64_t k, int64_t x_stride) {
  const int64_t block = 24;  // rows of w that stay cached while all rows of x pass
#pragma omp parallel for schedule(static) if (outs * k > 65536)
  for (int64_t n = 0; n < outs; n += block) {
    for (int64_t m = 0; m < rows; m += ROWS) {
      const int64_t count = std::min(ROWS, rows - m);
      OUTPUTS[count - 1](x + m * x_stride, w + n * k, bias ? bias + n : bias, y + m * outs + n,
                         std::min(block, outs - n), k, x_stride, outs);
    }
  }
}

// Rows of tokens of `row_bytes` each; strides between tokens in bytes.
void fullgraph_kv_write(const char* k, const char* v, char* kv, const int32_t* slots,
                        int64_t tokens, int64_t k_stride, int64_t v_stride, int64_t row_bytes,
                        int64_t page_size) {
  for (int64_t t = 0; t < tokens; ++t) {
    if (slots[t] < 0) continue;
    const int64_t page = slots[t] / page_size, offset = slots[t] % page_size;
    char* key = kv + (page * 2 * page_size + offset) * row_bytes;
    std::memcpy(key, k + t * k_stride, size_t(row_bytes));
    std::memcpy(key + page_size * row_bytes, v + t * v_stride, size_t(row_bytes));
  }
}

// Rows of one token each; others are left alone.
#define ATTEND(NAME, TYPE)                                                                        \
  void NAME(const void* q, const void* kv, const int32_t* table, const int32_t* slots,            \
            const int32_t* starts, const int32_t* lens, const int32_t* offsets, void* out,        \
            int64_t rows, int64_t q_stride, int64_t table_stride, int64_t heads,                  \
            int64_t kv_heads, int64_t head_dim, int64_t page_size, int64_t window, float scale) { \
    attend_rows(static_cast<const TYPE*>(q), static_cast<const TYPE*>(kv), table, slots, starts,  \
                lens, offsets, static_cast<TYPE*>(out), rows, q_stride, table_stride,             \
                Shape{heads, kv_heads, head_dim, page_size}, window, scale);                      \
  }
ATTEND(fullgraph_attend_float, float)
ATTEND(fullgraph_attend_bfloat16, bfloat16)

}  // extern "C"
"""
