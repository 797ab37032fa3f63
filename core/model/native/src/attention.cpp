#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

#include "tile.h"

namespace kvrelay {
namespace {

constexpr int64_t TILE_PANELS = TILE_TOKENS / PANEL;
constexpr float LOWEST = -FLT_MAX;  // not infinity: what is hidden then weighs exp(-inf) = 0, and changes no bit of a row

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// 16 rows of 16 words become 16 columns.
inline void transpose_words(const uint32_t* const rows[LANES], uint32_t* target, int64_t stride) {
#if defined(__AVX512F__)
    __m512i in[LANES], out[LANES] = {};
    for (int i = 0; i < LANES; ++i) in[i] = _mm512_loadu_si512(rows[i]);
    for (int i = 0; i < LANES; i += 2) {
        out[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        out[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4) {
        in[i] = _mm512_unpacklo_epi64(out[i], out[i + 2]);
        in[i + 1] = _mm512_unpackhi_epi64(out[i], out[i + 2]);
        in[i + 2] = _mm512_unpacklo_epi64(out[i + 1], out[i + 3]);
        in[i + 3] = _mm512_unpackhi_epi64(out[i + 1], out[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        out[i] = _mm512_shuffle_i32x4(in[i], in[i + 4], 0x88);
        out[i + 4] = _mm512_shuffle_i32x4(in[i], in[i + 4], 0xdd);
        out[i + 8] = _mm512_shuffle_i32x4(in[i + 8], in[i + 12], 0x88);
        out[i + 12] = _mm512_shuffle_i32x4(in[i + 8], in[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        _mm512_storeu_si512(target + i * stride, _mm512_shuffle_i32x4(out[i], out[i + 8], 0x88));
        _mm512_storeu_si512(target + (i + 8) * stride, _mm512_shuffle_i32x4(out[i], out[i + 8], 0xdd));
        _mm512_storeu_si512(target + (i + 4) * stride, _mm512_shuffle_i32x4(out[i + 4], out[i + 12], 0x88));
        _mm512_storeu_si512(target + (i + 12) * stride, _mm512_shuffle_i32x4(out[i + 4], out[i + 12], 0xdd));
    }
#else
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < LANES; ++j) target[j * stride + i] = rows[i][j];
#endif
}

// Keys as panels of 32 keys, [TILE_PANELS][width][32] for floats and [TILE_PANELS][width / 2][32][2] for bf16: both are words (a float
// or a pair), transposed. Missing keys are `zeros`.
template <typename T>
void pack_keys(const T* const keys[TILE_TOKENS], const T* zeros, int64_t head_dim, int64_t width, T* target) {
    const int64_t words = width * sizeof(T) / 4, given = head_dim * sizeof(T) / 4;
    uint32_t* out = reinterpret_cast<uint32_t*>(target);
    alignas(64) uint32_t ends[LANES][LANES];
    for (int64_t group = 0; group < TILE_TOKENS / LANES; ++group) {
        uint32_t* panel = out + group / (PANEL / LANES) * PANEL * words + group % (PANEL / LANES) * LANES;
        for (int64_t word = 0; word < words; word += LANES) {
            const uint32_t* rows[LANES];
            for (int i = 0; i < LANES; ++i) {
                const T* key = keys[group * LANES + i] ? keys[group * LANES + i] : zeros;
                rows[i] = reinterpret_cast<const uint32_t*>(key) + word;
                if (word + LANES > given) {  // the head's end, filled up with zeros
                    const int64_t count = std::max<int64_t>(given - word, 0);
                    std::memset(ends[i], 0, sizeof ends[i]);
                    std::memcpy(ends[i], rows[i], count * 4);
                    rows[i] = ends[i];
                }
            }
            transpose_words(rows, panel + word * PANEL, PANEL);
        }
    }
}

// Values as panels of 32 dimensions: [width / 32][TILE_TOKENS][32] for floats.
inline void pack_values(const float* const values[TILE_TOKENS], const float* zeros, int64_t head_dim, int64_t width, float* target) {
    for (int64_t panel = 0; panel < width / PANEL; ++panel) {
        const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, head_dim - first);
        for (int64_t token = 0; token < TILE_TOKENS; ++token) {
            float* row = target + (panel * TILE_TOKENS + token) * PANEL;
            if (count < PANEL) std::fill(row, row + PANEL, 0.0f);
            if (count > 0) std::memcpy(row, (values[token] ? values[token] : zeros) + first, count * sizeof(float));
        }
    }
}

// [width / 32][TILE_TOKENS / 2][32][2] for bf16: two tokens' values side by side.
inline void pack_values(const bf16* const values[TILE_TOKENS], const bf16* zeros, int64_t head_dim, int64_t width, bf16* target) {
    for (int64_t panel = 0; panel < width / PANEL; ++panel) {
        const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, head_dim - first);
        for (int64_t token = 0; token < TILE_TOKENS; token += 2) {
            const bf16* sources[2] = {(values[token] ? values[token] : zeros) + first,
                                      (values[token + 1] ? values[token + 1] : zeros) + first};
            bf16 padded[2][PANEL] = {};
            if (count < PANEL)
                for (int i = 0; i < 2; ++i) {
                    std::memcpy(padded[i], sources[i], std::max<int64_t>(count, 0) * sizeof(bf16));
                    sources[i] = padded[i];
                }
            bf16* row = target + (panel * TILE_TOKENS + token) * PANEL;
            for (int half = 0; half < PANEL; half += LANES) {
                vhalf low, high;
                std::memcpy(&low, sources[0] + half, sizeof low);
                std::memcpy(&high, sources[1] + half, sizeof high);
                const vuint pairs = __builtin_convertvector(low, vuint) | (__builtin_convertvector(high, vuint) << 16);
                std::memcpy(row + 2 * half, &pairs, sizeof pairs);
            }
        }
    }
}

// The softmax of some rows so far: highest score, sum of weights relative to it, weighted sum of values.
struct Softmax {
    float* highest;   // [rows]
    float* total;     // [rows]
    float* weighted;  // [rows][width]

    void clear(int64_t num_rows, int64_t width) const {
        std::fill(highest, highest + num_rows, LOWEST);
        std::fill(total, total + num_rows, 0.0f);
        std::fill(weighted, weighted + num_rows * width, 0.0f);
    }
};

inline float exp_one(float x) { return exp_of_negative(splat(x))[0]; }

// Fold `later` into `merged`, row by row.
void merge(const Softmax& merged, const Softmax& later, int64_t num_rows, int64_t width) {
    for (int64_t row = 0; row < num_rows; ++row) {
        const float highest = std::max(merged.highest[row], later.highest[row]);
        const float before = exp_one(merged.highest[row] - highest), after = exp_one(later.highest[row] - highest);
        merged.highest[row] = highest;
        merged.total[row] = merged.total[row] * before + later.total[row] * after;
        float *ours = merged.weighted + row * width, *theirs = later.weighted + row * width;
        for (int64_t i = 0; i < width; i += LANES) store(ours + i, load(ours + i) * before + load(theirs + i) * after);
    }
}

// One thread's memory, for pieces of up to max_rows rows.
template <typename T>
struct Scratch {
    std::vector<T> query, keys, values, weights, zeros;
    std::vector<float> scores, numbers;

    void reserve(int64_t max_rows, int64_t width) {
        query.resize(max_rows * width);
        keys.resize(TILE_TOKENS * width);
        values.resize(TILE_TOKENS * width);
        weights.resize(max_rows * TILE_TOKENS);
        zeros.resize(width + 32);
        scores.resize(max_rows * TILE_TOKENS);
        numbers.resize(2 * max_rows * (2 + width));
    }

    Softmax softmax(int64_t which, int64_t max_rows, int64_t width) {
        float* start = numbers.data() + which * max_rows * (2 + width);
        return {start, start + max_rows, start + 2 * max_rows};
    }
};

template <int ROWS, typename T, typename Take>
inline void tile_product(const T* panel, const T* rows, int64_t num_inputs, int64_t first_row, Take take) {
    Tile<ROWS> tile = {};
    accumulate<ROWS>(tile, panel, rows + first_row * num_inputs, num_inputs);
    for (int row = 0; row < ROWS; ++row) take(first_row + row, tile.sums[row]);
}

template <int ROWS, typename T, typename Take>
inline void some_rows(int64_t count, const T* panel, const T* rows, int64_t num_inputs, int64_t first_row, Take take) {
    if constexpr (ROWS > 1) {
        if (count < ROWS) return some_rows<ROWS - 1>(count, panel, rows, num_inputs, first_row, take);
    }
    tile_product<ROWS>(panel, rows, num_inputs, first_row, take);
}

// take(row, the row's products with the panel's 32 columns) for every row.
template <typename T, typename Take>
inline void product(const T* panel, const T* rows, int64_t num_inputs, int64_t num_rows, Take take) {
    const int64_t tiles = (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = num_rows * tile / tiles;
        some_rows<MAX_TILE_ROWS>(num_rows * (tile + 1) / tiles - first, panel, rows, num_inputs, first, take);
    }
}

// Rows of one piece: `group` heads of each token, token by token.
template <typename T>
struct PieceRows {
    const BatchPlan& plan;
    const Heads<T>& heads;
    const Piece& piece;
    int64_t group, width;

    int64_t num_rows() const { return piece.num_rows * group; }
    int64_t position(int64_t row) const { return piece.first_position + row / group; }
    int64_t last_position() const { return piece.first_position + piece.num_rows - 1; }
    int64_t first_seen(int64_t position) const {
        return heads.sliding_window ? std::max<int64_t>(position - heads.sliding_window + 1, 0) : 0;
    }
    int64_t offset(int64_t row) const {
        return ((piece.first_row + row / group) * heads.num_heads + piece.kv_head * group + row % group) * heads.head_dim;
    }
};

template <typename T>
void pack_tile(const PieceRows<T>& rows, int64_t first_position, Scratch<T>& scratch) {
    const BatchPlan& plan = rows.plan;
    const Heads<T>& heads = rows.heads;
    const T *keys[TILE_TOKENS], *values[TILE_TOKENS];
    const int64_t* table = plan.block_tables + rows.piece.request * plan.max_blocks;
    for (int64_t i = 0; i < TILE_TOKENS; ++i) {
        const int64_t position = first_position + i;
        if (position > rows.last_position()) {  // anything may lie there, a NaN too
            keys[i] = values[i] = nullptr;
            continue;
        }
        const int64_t at = table[position / plan.block_size] * heads.block_stride +
                           position % plan.block_size * heads.token_stride + rows.piece.kv_head * heads.head_dim;
        keys[i] = heads.key_cache + at;
        values[i] = heads.value_cache + at;
    }
    pack_keys(keys, scratch.zeros.data(), heads.head_dim, rows.width, scratch.keys.data());
    pack_values(values, scratch.zeros.data(), heads.head_dim, rows.width, scratch.values.data());
}

// The row's scores of a tile, scaled, capped and masked, become weights relative to its highest score so far.
template <typename T>
inline void weigh(const PieceRows<T>& rows, int64_t row, int64_t tile_position, Scratch<T>& scratch, const Softmax& softmax,
                  float* decay) {
    constexpr int64_t vectors = TILE_TOKENS / LANES;
    const float soft_cap = rows.heads.soft_cap;
    const int64_t position = rows.position(row), first_seen = rows.first_seen(position);
    const bool is_whole = first_seen <= tile_position && tile_position + TILE_TOKENS - 1 <= position;
    vfloat scores[vectors], highest = splat(-INFINITY);
    for (int64_t i = 0; i < vectors; ++i) {
        scores[i] = load(scratch.scores.data() + row * TILE_TOKENS + i * LANES) * rows.heads.scale;
        if (soft_cap != 0.0f) scores[i] = (1.0f - 2.0f / (exp_lanes(scores[i] * (2.0f / soft_cap)) + 1.0f)) * soft_cap;
        if (!is_whole) {
            const vint at = int32_t(tile_position + i * LANES) + vint{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const vint is_seen = (at <= int32_t(position)) & (at >= int32_t(first_seen));
            scores[i] = select(is_seen, scores[i], splat(-INFINITY));
        }
        highest = select(scores[i] > highest, scores[i], highest);
    }
    const float now = std::max(softmax.highest[row], highest_lane(highest));
    vfloat total = {};
    for (int64_t i = 0; i < vectors; ++i) {
        const vfloat weights = exp_of_negative(scores[i] - now);
        total += weights;
        store(scratch.weights.data() + row * TILE_TOKENS + i * LANES, weights);
    }
    decay[row] = exp_one(softmax.highest[row] - now);
    softmax.total[row] = softmax.total[row] * decay[row] + sum_lanes(total);
    softmax.highest[row] = now;
}

template <typename T>
void add_tile(const PieceRows<T>& rows, int64_t tile_position, Scratch<T>& scratch, const Softmax& softmax) {
    const int64_t num_rows = rows.num_rows(), width = rows.width;
    pack_tile(rows, tile_position, scratch);
    for (int64_t panel = 0; panel < TILE_PANELS; ++panel)
        product(scratch.keys.data() + panel * PANEL * width, scratch.query.data(), width, num_rows,
                [&](int64_t row, const vfloat* sums) {
                    float* scores = scratch.scores.data() + row * TILE_TOKENS + panel * PANEL;
                    for (int i = 0; i < VECTORS; ++i) store(scores + i * LANES, sums[i]);
                });
    float decay[QUERY_TILE_TOKENS * 64];
    for (int64_t row = 0; row < num_rows; ++row) weigh(rows, row, tile_position, scratch, softmax, decay);
    for (int64_t panel = 0; panel < width / PANEL; ++panel)
        product(scratch.values.data() + panel * PANEL * TILE_TOKENS, scratch.weights.data(), TILE_TOKENS, num_rows,
                [&](int64_t row, const vfloat* sums) {
                    float* weighted = softmax.weighted + row * width + panel * PANEL;
                    for (int i = 0; i < VECTORS; ++i)
                        store(weighted + i * LANES, load(weighted + i * LANES) * decay[row] + sums[i]);
                });
}

// One split of a piece, from nothing.
template <typename T>
void add_split(const PieceRows<T>& rows, int64_t split, Scratch<T>& scratch, const Softmax& softmax) {
    softmax.clear(rows.num_rows(), rows.width);
    const int64_t end = std::min((split + 1) * SPLIT_TOKENS, rows.last_position() + 1);
    const int64_t first_seen = rows.first_seen(rows.piece.first_position);
    for (int64_t tile = split * SPLIT_TOKENS; tile < end; tile += TILE_TOKENS)
        if (tile + TILE_TOKENS > first_seen) add_tile(rows, tile, scratch, softmax);
}

template <typename T>
void write_output(const PieceRows<T>& rows, const Softmax& softmax) {
    for (int64_t row = 0; row < rows.num_rows(); ++row) {
        T* output = rows.heads.output + rows.offset(row);
        const float* weighted = softmax.weighted + row * rows.width;
        const int64_t head_dim = rows.heads.head_dim;
        int64_t i = 0;
        for (; i + LANES <= head_dim; i += LANES) store(output + i, load(weighted + i) / softmax.total[row]);
        if (i < head_dim) store_part(output + i, load(weighted + i) / softmax.total[row], int(head_dim - i));
    }
}

template <typename T>
void compute_piece(const PieceRows<T>& rows, int64_t max_rows, Scratch<T>& scratch, float* partials) {
    const int64_t num_rows = rows.num_rows(), width = rows.width, head_dim = rows.heads.head_dim;
    scratch.reserve(max_rows, width);
    for (int64_t row = 0; row < num_rows; ++row) {
        T* query = scratch.query.data() + row * width;
        std::memcpy(query, rows.heads.query + rows.offset(row), head_dim * sizeof(T));
        std::memset(query + head_dim, 0, (width - head_dim) * sizeof(T));
    }
    if (rows.piece.partial >= 0) {
        float* start = partials + rows.piece.partial * max_rows * (2 + width);
        add_split(rows, rows.piece.first_split, scratch, {start, start + max_rows, start + 2 * max_rows});
        return;
    }
    const Softmax merged = scratch.softmax(0, max_rows, width), split = scratch.softmax(1, max_rows, width);
    merged.clear(num_rows, width);
    for (int64_t i = rows.piece.first_split; i < rows.piece.end_split; ++i) {
        add_split(rows, i, scratch, split);
        merge(merged, split, num_rows, width);
    }
    write_output(rows, merged);
}

int64_t first_split_of(const Piece& piece, int64_t sliding_window) {
    return sliding_window ? std::max<int64_t>(piece.first_position - sliding_window + 1, 0) / SPLIT_TOKENS : 0;
}

}  // namespace

template <typename T>
void attend(const BatchPlan& plan, const Heads<T>& heads) {
    const int64_t group = heads.num_heads / heads.num_kv_heads, width = round_up(heads.head_dim, PANEL);
    const int64_t token_limit = std::max<int64_t>(1, QUERY_TILE_TOKENS * 4 / std::max<int64_t>(group, 4));
    std::vector<Piece> wholes;
    int64_t max_rows = 0;
    for (int64_t request = 0; request < plan.num_requests; ++request) {
        const int64_t start = plan.query_start[request], count = plan.query_start[request + 1] - start;
        for (int64_t first = 0; first < count; first += token_limit) {
            Piece piece = {request, start + first, std::min(token_limit, count - first), plan.seq_lens[request] - count + first, 0, 0, 0, -1};
            piece.first_split = first_split_of(piece, heads.sliding_window);
            piece.end_split = (piece.first_position + piece.num_rows - 1) / SPLIT_TOKENS + 1;
            max_rows = std::max(max_rows, piece.num_rows * group);
            for (piece.kv_head = 0; piece.kv_head < heads.num_kv_heads; ++piece.kv_head) wholes.push_back(piece);
        }
    }
    // With too few pieces for all threads, each split is one, and is merged afterwards.
    const int64_t threads = omp_get_max_threads();
    const bool is_split = threads > 1 && int64_t(wholes.size()) < 4 * threads;
    std::vector<Piece> pieces;
    int64_t num_partials = 0;
    for (Piece& whole : wholes) {
        whole.partial = num_partials;
        if (!is_split || whole.end_split - whole.first_split < 2) {
            pieces.push_back(whole);
            pieces.back().partial = -1;
            whole.end_split = whole.first_split;  // nothing to merge
            continue;
        }
        for (int64_t split = whole.first_split; split < whole.end_split; ++split) {
            pieces.push_back(whole);
            pieces.back().first_split = split;
            pieces.back().partial = num_partials++;
        }
    }
    std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
        return a.num_rows * (a.end_split - a.first_split) > b.num_rows * (b.end_split - b.first_split);
    });
    std::vector<float> partials(num_partials * max_rows * (2 + width));
#pragma omp parallel
    {
        static thread_local Scratch<T> scratch;
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < pieces.size(); ++i)
            compute_piece<T>({plan, heads, pieces[i], group, width}, max_rows, scratch, partials.data());
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < wholes.size(); ++i) {
            const int64_t count = wholes[i].end_split - wholes[i].first_split;
            if (count == 0) continue;
            const PieceRows<T> rows = {plan, heads, wholes[i], group, width};
            const Softmax merged = scratch.softmax(0, max_rows, width);
            merged.clear(rows.num_rows(), width);
            for (int64_t split = 0; split < count; ++split) {
                float* start = partials.data() + (wholes[i].partial + split) * max_rows * (2 + width);
                merge(merged, {start, start + max_rows, start + 2 * max_rows}, rows.num_rows(), width);
            }
            write_output(rows, merged);
        }
    }
}

template void attend(const BatchPlan&, const Heads<float>&);
template void attend(const BatchPlan&, const Heads<bf16>&);

}  // namespace kvrelay
