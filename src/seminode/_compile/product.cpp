// Products of matrices in single precision, for processors on which the libraries need up to three times as long. This
// text becomes part of the programs that call them: see products.py.
#if defined(__AVX512F__)
#include <immintrin.h>
#include <omp.h>

#include <algorithm>

#define UNROLLED _Pragma("GCC unroll 8")  // so that sums are in registers

namespace seminode {
namespace {

constexpr int64_t LANES = 16;  // numbers in a vector
constexpr int64_t WIDTH = 3 * LANES, DEPTH = 192;  // of the part of b that is used at a time: at most 36 kB
constexpr int64_t FEW = 8;  // rows or columns of c
constexpr int64_t LARGE = int64_t{1} << 30;  // multiplications that are left to the library
constexpr int64_t SHARED = int64_t{1} << 19;  // multiplications for which a second thread is worth while

struct Matrix {
    float* data;
    int64_t rows, columns, by_row, by_column;  // sizes and strides

    float* at(int64_t i, int64_t j) const { return data + i * by_row + j * by_column; }
    Matrix below(int64_t i) const { return part(i, 0, rows, columns); }
    Matrix part(int64_t i, int64_t j, int64_t height, int64_t width) const {
        return {at(i, j), std::min(height, rows - i), std::min(width, columns - j), by_row, by_column};
    }
};

// R rows and V vectors of c = a b or, if `more`, of c += a b. All sums are in registers. The last vector has the
// columns that `last` selects.
template <int R, int V>
inline void tile(Matrix a, Matrix b, Matrix c, __mmask16 last, bool more) {
    const __mmask16 all = 0xFFFF;
    __m512 sums[R][V];
    UNROLLED for (int i = 0; i < R; ++i)
        UNROLLED for (int v = 0; v < V; ++v) sums[i][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < a.columns; ++k, a.data += a.by_column, b.data += b.by_row) {
        // Of a matrix that is stored by columns, the next tile reads the next numbers of each.
        _mm_prefetch(reinterpret_cast<const char*>(a.data + LANES), _MM_HINT_T0);
        __m512 row[V];
        UNROLLED for (int v = 0; v < V; ++v) row[v] = _mm512_maskz_loadu_ps(v == V - 1 ? last : all, b.data + LANES * v);
        UNROLLED for (int i = 0; i < R; ++i) {
            const __m512 factor = _mm512_set1_ps(a.data[i * a.by_row]);
            UNROLLED for (int v = 0; v < V; ++v) sums[i][v] = _mm512_fmadd_ps(factor, row[v], sums[i][v]);
        }
    }
    UNROLLED for (int i = 0; i < R; ++i)
        UNROLLED for (int v = 0; v < V; ++v) {
            const __mmask16 selected = v == V - 1 ? last : all;
            float* const sum = c.at(i, LANES * v);
            if (more) sums[i][v] = _mm512_add_ps(sums[i][v], _mm512_maskz_loadu_ps(selected, sum));
            _mm512_mask_storeu_ps(sum, selected, sums[i][v]);
        }
}

template <int V>
void tiles(const Matrix& a, const Matrix& b, const Matrix& c, __mmask16 last, bool more) {
    int64_t i = 0;
    for (; i + 8 <= a.rows; i += 8) tile<8, V>(a.below(i), b, c.below(i), last, more);
    for (; i + 4 <= a.rows; i += 4) tile<4, V>(a.below(i), b, c.below(i), last, more);
    for (; i < a.rows; ++i) tile<1, V>(a.below(i), b, c.below(i), last, more);
}

// A copy of b whose rows have no gaps.
Matrix by_rows(const Matrix& b, float* space) {
    const Matrix copy = {space, b.rows, b.columns, WIDTH, 1};
    for (int64_t j = 0; j < b.columns; j += 4)
        for (int64_t k = 0; k < b.rows; k += 4) {
            if (b.by_row == 1 && j + 4 <= b.columns && k + 4 <= b.rows) {
                __m128 w = _mm_loadu_ps(b.at(k, j)), x = _mm_loadu_ps(b.at(k, j + 1));
                __m128 y = _mm_loadu_ps(b.at(k, j + 2)), z = _mm_loadu_ps(b.at(k, j + 3));
                _MM_TRANSPOSE4_PS(w, x, y, z);
                _mm_storeu_ps(copy.at(k, j), w), _mm_storeu_ps(copy.at(k + 1, j), x);
                _mm_storeu_ps(copy.at(k + 2, j), y), _mm_storeu_ps(copy.at(k + 3, j), z);
                continue;
            }
            for (int64_t n = k; n < std::min(k + 4, b.rows); ++n)
                for (int64_t m = j; m < std::min(j + 4, b.columns); ++m) *copy.at(n, m) = *b.at(n, m);
        }
    return copy;
}

// R rows and C columns of c = a b as sums over vectors, for a with rows and b with columns that have no gaps.
template <int R, int C>
inline void dots(const Matrix& a, const Matrix& b, const Matrix& c, int64_t i0, int64_t j0) {
    __m512 sums[R][C];
    UNROLLED for (int i = 0; i < R; ++i)
        UNROLLED for (int j = 0; j < C; ++j) sums[i][j] = _mm512_setzero_ps();
    for (int64_t k = 0; k < a.columns; k += LANES) {
        const __mmask16 selected = k + LANES <= a.columns ? 0xFFFF : (1u << (a.columns - k)) - 1;
        __m512 column[C];
        UNROLLED for (int j = 0; j < C; ++j) column[j] = _mm512_maskz_loadu_ps(selected, b.at(k, j0 + j));
        UNROLLED for (int i = 0; i < R; ++i) {
            const __m512 row = _mm512_maskz_loadu_ps(selected, a.at(i0 + i, k));
            UNROLLED for (int j = 0; j < C; ++j) sums[i][j] = _mm512_fmadd_ps(row, column[j], sums[i][j]);
        }
    }
    UNROLLED for (int i = 0; i < R; ++i)
        UNROLLED for (int j = 0; j < C; ++j) *c.at(i0 + i, j0 + j) = _mm512_reduce_add_ps(sums[i][j]);
}

template <int R>
void dots_of_rows(const Matrix& a, const Matrix& b, const Matrix& c, int64_t i) {
    int64_t j = 0;
    for (; j + 4 <= b.columns; j += 4) dots<R, 4>(a, b, c, i, j);
    for (; j < b.columns; ++j) dots<R, 1>(a, b, c, i, j);
}

void multiply(const Matrix& a, const Matrix& b, const Matrix& c) {
    if (a.by_column == 1 && b.by_row == 1 && std::min(a.rows, b.columns) <= FEW) {
        int64_t i = 0;
        for (; i + 4 <= a.rows; i += 4) dots_of_rows<4>(a, b, c, i);
        for (; i < a.rows; ++i) dots_of_rows<1>(a, b, c, i);
        return;
    }
    alignas(64) float space[WIDTH * DEPTH];
    const int64_t vectors = (b.columns + LANES - 1) / LANES, panels = (vectors + 2) / 3;
    const int64_t width = (vectors + panels - 1) / panels * LANES;
    for (int64_t j = 0; j < b.columns; j += width) {
        const Matrix sums = c.part(0, j, c.rows, width);
        const int64_t used = (sums.columns + LANES - 1) / LANES;
        const __mmask16 last = (1u << (sums.columns - (used - 1) * LANES)) - 1;
        for (int64_t k = 0; k < b.rows; k += DEPTH) {
            const Matrix terms = b.part(k, j, DEPTH, width);
            const Matrix rows = b.by_column == 1 ? terms : by_rows(terms, space);
            const Matrix factors = a.part(0, k, a.rows, DEPTH);
            const auto add = used == 1 ? tiles<1> : used == 2 ? tiles<2> : tiles<3>;
            add(factors, rows, sums, last, k > 0);
        }
    }
}

bool read(AtenTensorHandle tensor, Matrix& matrix) {
    int32_t dtype;
    int64_t *sizes, *strides, dimensions;
    void* data;
    if (aoti_torch_get_dtype(tensor, &dtype) || dtype != aoti_torch_dtype_float32() ||
        aoti_torch_get_dim(tensor, &dimensions) || dimensions != 2 || aoti_torch_get_sizes(tensor, &sizes) ||
        aoti_torch_get_strides(tensor, &strides) || aoti_torch_get_data_ptr(tensor, &data)) {
        return false;
    }
    matrix = {static_cast<float*>(data), sizes[0], sizes[1], strides[0], strides[1]};
    return true;
}

AOTITorchError product_out(AtenTensorHandle out, AtenTensorHandle first, AtenTensorHandle second) {
    Matrix a, b, c;
    const bool plain = read(out, c) && read(first, a) && read(second, b) && c.by_column == 1;
    const int64_t multiplications = plain ? a.rows * a.columns * b.columns : 0;
    if (multiplications == 0 || multiplications > LARGE) return aoti_torch_cpu_mm_out(out, first, second);
    const int64_t threads = std::min<int64_t>(omp_get_max_threads(), multiplications / SHARED);
    if (threads <= 1) {
        multiply(a, b, c);
        return AOTI_TORCH_SUCCESS;
    }
    const bool across = b.columns > 2 * a.rows;  // whether threads share the columns or the rows
    const int64_t unit = across ? WIDTH : 8, size = across ? b.columns : a.rows;
    const int64_t part = ((size + unit - 1) / unit + threads - 1) / threads * unit;
#pragma omp parallel for num_threads(threads)
    for (int64_t start = 0; start < size; start += part) {
        if (across)
            multiply(a, b.part(0, start, b.rows, part), c.part(0, start, c.rows, part));
        else
            multiply(a.part(start, 0, part, a.columns), b, c.part(start, 0, part, c.columns));
    }
    return AOTI_TORCH_SUCCESS;
}

}  // namespace
}  // namespace seminode

#undef UNROLLED
using seminode::product_out;
#else
#define product_out aoti_torch_cpu_mm_out
#endif
