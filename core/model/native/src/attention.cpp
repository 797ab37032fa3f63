// What attention.h promises. KV is read in tiles of 64 keys at fixed positions; 8 tiles make a split, which has a softmax of its own.
// Splits are merged in position order, by the same function whether one thread had them all or several shared them. So
// neither chunks nor batch nor threads show in a row's bits; a tile that a row does not see leaves it as it was.
#include "attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "kv_tile.h"

namespace kvrelay {
namespace {

constexpr int64_t SPLIT_TILES = 8;
constexpr int64_t QUERY_TILE_TOKENS = 64;  // query tokens that share a packed tile
constexpr int64_t FEW_TOKENS = 4;          // so few have all heads in one piece: the heads of a key lie side by side in memory
constexpr float LOWEST = std::numeric_limits<float>::lowest();  // the maximum of what has seen nothing

// soft_cap * tanh(score / soft_cap), by exp of what is not positive.
inline vfloat capped(vfloat score, float soft_cap) {
    const vfloat size = select(score < 0.0f, -score, score);
    const vfloat e = exp_of_negative(size * (-2.0f / soft_cap));
    const vfloat result = (1.0f - e) / (1.0f + e) * soft_cap;
    return select(score < 0.0f, -result, result);
}

// Softmax of a set of rows over some positions: of each the highest score, the sum of weights relative to it (by lane), and
// the values weighted likewise, [columns].
struct Softmax {
    float* highest;
    vfloat* total;
    float* weighted;
    int64_t columns;

    void clear(int64_t num_rows) {
        std::fill_n(highest, num_rows, LOWEST);
        std::fill_n(total, num_rows, vfloat{});
        std::fill_n(weighted, num_rows * columns, 0.0f);
    }
    Softmax from(int64_t row) const { return {highest + row, total + row, weighted + row * columns, columns}; }
    static int64_t floats(int64_t num_rows, int64_t columns) { return num_rows * (columns + LANES) + (num_rows + LANES - 1) / LANES * LANES; }
    static Softmax at(float* memory, int64_t num_rows, int64_t columns) {  // aligned to a vector
        float* const weighted = memory + num_rows * LANES;
        return {weighted + num_rows * columns, reinterpret_cast<vfloat*>(memory), weighted, columns};
    }
};

// Add one row's scores of a tile: those of keys begin to end count, the others are hidden. Leaves the weights, and returns by what
// the row's former sums must be multiplied. Not inlined, so that every row meets the same instructions.
template <typename T>
__attribute__((noinline)) float weigh(const float* scores, int begin, int end, float scale, float soft_cap, float& highest,
                                      vfloat& total, T* weights) {
    constexpr int VECTORS_PER_TILE = TILE_KEYS / LANES;
    const vint lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vfloat values[VECTORS_PER_TILE];
    vfloat most = splat(LOWEST);
    for (int i = 0; i < VECTORS_PER_TILE; ++i) {
        values[i] = load(scores + i * LANES) * scale;
        if (soft_cap != 0.0f) values[i] = capped(values[i], soft_cap);
        if (begin > 0 || end < TILE_KEYS) {
            const vint key = lane + i * LANES;
            values[i] = select((key >= begin) & (key < end), values[i], splat(LOWEST));
        }
        most = select(values[i] > most, values[i], most);
    }
    const float before = highest;
    const float after = std::max(before, highest_lane(most));
    vfloat sum = {};
    for (int i = 0; i < VECTORS_PER_TILE; ++i) {
        const vfloat weight = exp_of_negative(values[i] - after);
        sum += weight;
        store(weights + i * LANES, weight);
    }
    const float decay = exp_of_negative(splat(before - after))[0];
    total = total * decay + sum;
    highest = after;
    return decay;
}

__attribute__((noinline)) void add_scaled(float* sums, float decay, const float* more, float factor, int64_t columns) {
    for (int64_t i = 0; i < columns; i += LANES) store(sums + i, load(sums + i) * decay + load(more + i) * factor);
}

// Merge one row of a later split.
__attribute__((noinline)) void merge_row(Softmax sum, Softmax split) {
    if (*split.highest == LOWEST) return;
    const float after = std::max(*sum.highest, *split.highest);
    const vfloat exponents = {*sum.highest - after, *split.highest - after};
    const vfloat factors = exp_of_negative(exponents);
    *sum.total = *sum.total * factors[0] + *split.total * factors[1];
    add_scaled(sum.weighted, factors[0], split.weighted, factors[1], sum.columns);
    *sum.highest = after;
}

template <typename T>
__attribute__((noinline)) void write_row(Softmax sum, T* output, int64_t head_dim) {
    const vfloat total = splat(sum_lanes(*sum.total));
    for (int64_t i = 0; i < head_dim; i += LANES) {
        const vfloat value = load(sum.weighted + i) / total;
        if (i + LANES <= head_dim) store(output + i, value);
        else store_part(output + i, value, int(head_dim - i));
    }
}

// rows [num_rows][depth] times a panel [depth][PANEL], into outputs of the given stride.
template <int ROWS, typename T>
inline void multiply_rows(const T* rows, int64_t depth, const T* panel, float* outputs, int64_t stride) {
    Tile<ROWS> tile = {};
    accumulate<ROWS>(tile, panel, rows, depth);
    for (int row = 0; row < ROWS; ++row)
        for (int v = 0; v < VECTORS; ++v) store(outputs + row * stride + v * LANES, tile.sums[row][v]);
}

template <int ROWS, typename T>
inline void multiply_rest(int64_t num_rows, const T* rows, int64_t depth, const T* panel, float* outputs, int64_t stride) {
    if constexpr (ROWS > 0) {
        if (num_rows == ROWS) multiply_rows<ROWS>(rows, depth, panel, outputs, stride);
        else multiply_rest<ROWS - 1>(num_rows, rows, depth, panel, outputs, stride);
    }
}

template <typename T>
void multiply(int64_t num_rows, const T* rows, int64_t depth, const T* panel, float* outputs, int64_t stride) {
    int64_t row = 0;
    for (; row + MAX_TILE_ROWS <= num_rows; row += MAX_TILE_ROWS)
        multiply_rows<MAX_TILE_ROWS>(rows + row * depth, depth, panel, outputs + row * stride, stride);
    multiply_rest<MAX_TILE_ROWS - 1>(num_rows - row, rows + row * depth, depth, panel, outputs + row * stride, stride);
}

// Some query tokens of one request and the query heads of some KV heads, over tiles first_tile to end_tile. partial: where the
// softmax of each split goes, or -1: all of them are this piece's, which writes the output.
struct Piece {
    int64_t request, first_row, num_tokens, first_position, first_head, num_heads, first_tile, end_tile, partial;
    int64_t cost() const { return (end_tile - first_tile) * num_tokens * num_heads; }
    int64_t num_splits() const { return (end_tile - 1) / SPLIT_TILES - first_tile / SPLIT_TILES + 1; }
};

// Memory of a thread, used again by every piece.
class Scratch {
  public:
    float* take(int64_t num_floats) {
        if (num_floats > size_) {
            memory_.reset(static_cast<float*>(std::aligned_alloc(64, (num_floats * sizeof(float) + 63) / 64 * 64)));
            size_ = num_floats;
        }
        return memory_.get();
    }

  private:
    struct Free {
        void operator()(float* memory) const { std::free(memory); }
    };
    std::unique_ptr<float, Free> memory_;
    int64_t size_ = 0;
};

inline int64_t whole_vectors(int64_t num_floats) { return (num_floats + LANES - 1) / LANES * LANES; }

template <typename T>
int64_t max_rows(const AttentionArgs<T>& args) {
    return std::max(QUERY_TILE_TOKENS * (args.num_heads / args.num_kv_heads), FEW_TOKENS * args.num_heads);
}

// Computes pieces one after the other. Rows of a piece: KV head by KV head, token by token, query head by query head.
template <typename T>
class Worker {
  public:
    Worker(const AttentionArgs<T>& args, Scratch& scratch)
        : args_(args), head_(args.head_dim), group_(args.num_heads / args.num_kv_heads), max_rows_(max_rows(args)) {
        constexpr int64_t PER_FLOAT = HeadSize<T>::PER_UNIT;
        const int64_t columns = head_.columns(), softmax = Softmax::floats(max_rows_, columns);
        const std::vector<int64_t> sizes = {whole_vectors(max_rows_ * head_.padded_dim / PER_FLOAT + 1),
                                            head_.padded_dim * TILE_KEYS / PER_FLOAT,
                                            columns * TILE_KEYS / PER_FLOAT,
                                            max_rows_ * TILE_KEYS,
                                            max_rows_ * TILE_KEYS / PER_FLOAT,
                                            max_rows_ * columns,
                                            whole_vectors(max_rows_),
                                            whole_vectors(head_.dim),
                                            softmax,
                                            softmax};
        float* memory = scratch.take(std::accumulate(sizes.begin(), sizes.end(), int64_t(0)));
        std::vector<float*> parts;
        for (const int64_t size : sizes) {
            parts.push_back(memory);
            memory += size;
        }
        query_ = reinterpret_cast<T*>(parts[0]);
        keys_ = reinterpret_cast<T*>(parts[1]);
        values_ = reinterpret_cast<T*>(parts[2]);
        scores_ = parts[3];
        weights_ = reinterpret_cast<T*>(parts[4]);
        products_ = parts[5];
        decays_ = parts[6];
        std::fill_n(parts[7], sizes[7], 0.0f);
        zeros_ = reinterpret_cast<T*>(parts[7]);
        split_ = Softmax::at(parts[8], max_rows_, columns);
        sum_ = Softmax::at(parts[9], max_rows_, columns);
    }

    void compute(const Piece& piece, float* partials, int64_t partial_floats) {
        const int64_t num_rows = piece.num_heads * piece.num_tokens * group_;
        for (int64_t row = 0; row < num_rows; ++row) read_query(piece, row);
        if (piece.partial < 0) sum_.clear(num_rows);
        for (int64_t tile = piece.first_tile; tile < piece.end_tile;) {
            const int64_t end = std::min((tile / SPLIT_TILES + 1) * SPLIT_TILES, piece.end_tile);
            Softmax split = piece.partial < 0 ? split_ : at(partials + piece.partial * partial_floats);
            split.clear(num_rows);
            for (; tile < end; ++tile) add_tile(piece, tile, split);
            if (piece.partial < 0)
                for (int64_t row = 0; row < num_rows; ++row) merge_row(sum_.from(row), split.from(row));
        }
        if (piece.partial < 0) write(piece);
    }

    // Of a piece whose splits were computed by themselves.
    void merge(const Piece& piece, float* partials, int64_t partial_floats) {
        const int64_t num_rows = piece.num_heads * piece.num_tokens * group_;
        sum_.clear(num_rows);
        for (int64_t s = 0; s < piece.num_splits(); ++s) {
            const Softmax split = at(partials + (piece.partial + s) * partial_floats);
            for (int64_t row = 0; row < num_rows; ++row) merge_row(sum_.from(row), split.from(row));
        }
        write(piece);
    }

  private:
    Softmax at(float* memory) const { return Softmax::at(memory, max_rows_, head_.columns()); }

    // Where a row lies in query and output.
    int64_t place(const Piece& piece, int64_t row) const {
        const int64_t rows_per_head = piece.num_tokens * group_, i = row % rows_per_head;
        const int64_t head = (piece.first_head + row / rows_per_head) * group_ + i % group_;
        return ((piece.first_row + i / group_) * args_.num_heads + head) * head_.dim;
    }

    void read_query(const Piece& piece, int64_t row) {
        T* target = query_ + row * head_.padded_dim;
        std::memcpy(target, args_.query + place(piece, row), head_.dim * sizeof(T));
        if (head_.padded_dim > head_.dim) std::memset(target + head_.dim, 0, sizeof(T));
    }

    void write(const Piece& piece) {
        for (int64_t row = 0; row < piece.num_heads * piece.num_tokens * group_; ++row)
            write_row(sum_.from(row), args_.output + place(piece, row), head_.dim);
    }

    void add_tile(const Piece& piece, int64_t tile, const Softmax& split) {
        const int64_t start = tile * TILE_KEYS;
        find_keys(piece, start, key_tokens_, value_tokens_);
        for (int64_t h = 0; h < piece.num_heads; ++h) {
            const int64_t offset = (piece.first_head + h) * head_.dim;
            const T *keys[TILE_KEYS], *values[TILE_KEYS];
            for (int i = 0; i < TILE_KEYS; ++i) {
                keys[i] = key_tokens_[i] == nullptr ? zeros_ : key_tokens_[i] + offset;
                values[i] = value_tokens_[i] == nullptr ? zeros_ : value_tokens_[i] + offset;
            }
            fetch_ahead(piece, tile + 1, h);
            pack_keys(keys, head_, keys_);
            pack_values(values, head_, values_);
            const int64_t rows = piece.num_tokens * group_;
            add_head(piece, start, rows, query_ + h * rows * head_.padded_dim, split.from(h * rows));
        }
    }

    // One KV head's rows over the packed tile.
    void add_head(const Piece& piece, int64_t start, int64_t num_rows, const T* query, const Softmax& split) {
        for (int p = 0; p < KEY_PANELS; ++p)
            multiply(num_rows, query, head_.padded_dim, keys_ + p * head_.padded_dim * PANEL, scores_ + p * PANEL, TILE_KEYS);
        int64_t first_seen = num_rows, end_seen = 0;  // rows that see the tile follow one another, since positions ascend
        for (int64_t token = 0; token < piece.num_tokens; ++token) {
            const int64_t position = piece.first_position + token;
            const int64_t begin = args_.sliding_window ? std::max<int64_t>(position - args_.sliding_window + 1 - start, 0) : 0;
            const int64_t end = std::min<int64_t>(position + 1 - start, TILE_KEYS);
            if (begin >= end) continue;
            first_seen = std::min(first_seen, token * group_);
            end_seen = (token + 1) * group_;
            for (int64_t row = token * group_; row < end_seen; ++row)
                decays_[row] = weigh<T>(scores_ + row * TILE_KEYS, int(begin), int(end), args_.scale, args_.soft_cap,
                                        split.highest[row], split.total[row], weights_ + row * TILE_KEYS);
        }
        for (int64_t p = 0; p < head_.panels; ++p)
            multiply(end_seen - first_seen, weights_ + first_seen * TILE_KEYS, TILE_KEYS, values_ + p * TILE_KEYS * PANEL,
                     products_ + first_seen * split.columns + p * PANEL, split.columns);
        for (int64_t row = first_seen; row < end_seen; ++row)
            add_scaled(split.weighted + row * split.columns, decays_[row], products_ + row * split.columns, 1.0f, split.columns);
    }

    // Where the tokens of a tile lie; nullptr beyond the sequence's end.
    void find_keys(const Piece& piece, int64_t start, const T** keys, const T** values) const {
        const int64_t* table = args_.block_tables + piece.request * args_.table_stride;
        const int64_t num_keys = std::min<int64_t>(args_.seq_lens[piece.request] - start, TILE_KEYS);
        int64_t block = start / args_.block_size, offset = start % args_.block_size;
        for (int64_t i = 0; i < TILE_KEYS; ++i) {
            const int64_t at = i < num_keys ? table[block] * args_.block_stride + offset * args_.token_stride : -1;
            keys[i] = at < 0 ? nullptr : args_.key_cache + at;
            values[i] = at < 0 ? nullptr : args_.value_cache + at;
            if (++offset == args_.block_size) {
                offset = 0;
                ++block;
            }
        }
    }

    // Bring a part of a later tile, one for each head of this one, into the cache: decoding is bound by reading KV.
    void fetch_ahead(const Piece& piece, int64_t tile, int64_t part) const {
        constexpr int64_t LINE = 64 / sizeof(T);
        if (tile >= piece.end_tile) return;
        const int64_t* table = args_.block_tables + piece.request * args_.table_stride;
        const int64_t per_part = (TILE_KEYS + piece.num_heads - 1) / piece.num_heads;
        const int64_t end = std::min({tile * TILE_KEYS + (part + 1) * per_part, (tile + 1) * TILE_KEYS, args_.seq_lens[piece.request]});
        for (int64_t i = tile * TILE_KEYS + part * per_part; i < end; ++i) {
            const int64_t at = table[i / args_.block_size] * args_.block_stride + i % args_.block_size * args_.token_stride +
                               piece.first_head * head_.dim;
            for (int64_t element = 0; element < piece.num_heads * head_.dim; element += LINE) {
                __builtin_prefetch(args_.key_cache + at + element, 0, 2);
                __builtin_prefetch(args_.value_cache + at + element, 0, 2);
            }
        }
    }

    const AttentionArgs<T>& args_;
    HeadSize<T> head_;
    int64_t group_, max_rows_;
    T *query_, *keys_, *values_, *weights_, *zeros_;  // rows; the packed tile; one tile's weights; a head of zeros
    float *scores_, *products_, *decays_;
    const T *key_tokens_[TILE_KEYS], *value_tokens_[TILE_KEYS];
    Softmax split_, sum_;
};

template <typename T>
std::vector<Piece> cut_into_pieces(const AttentionArgs<T>& args, int64_t num_threads) {
    std::vector<Piece> pieces;
    const bool is_by_head = args.num_requests < 2 * num_threads;  // else there is enough to do for everybody
    for (int64_t request = 0; request < args.num_requests; ++request) {
        const int64_t start = args.query_start[request], end = args.query_start[request + 1];
        for (int64_t row = start; row < end; row += QUERY_TILE_TOKENS) {
            const int64_t num_tokens = std::min(QUERY_TILE_TOKENS, end - row);
            const int64_t position = args.seq_lens[request] - (end - row);
            const int64_t first_seen = args.sliding_window ? std::max<int64_t>(position - args.sliding_window + 1, 0) : 0;
            const int64_t end_tile = (position + num_tokens - 1) / TILE_KEYS + 1;
            const int64_t heads = is_by_head || num_tokens > FEW_TOKENS ? 1 : args.num_kv_heads;
            for (int64_t head = 0; head < args.num_kv_heads; head += heads)
                pieces.push_back({request, row, num_tokens, position, head, heads, first_seen / TILE_KEYS, end_tile, -1});
        }
    }
    return pieces;
}

struct Work {
    std::vector<Piece> pieces;  // the longest first
    std::vector<Piece> merges;  // pieces whose splits are pieces of their own; with the first one's partial
    int64_t num_partials = 0;
};

// What is more than a thread's fair part is cut at the splits, so that nobody waits long for the last one.
Work share(std::vector<Piece> pieces, int64_t num_threads) {
    Work work;
    int64_t total = 0;
    for (const Piece& piece : pieces) total += piece.cost();
    for (Piece& piece : pieces) {
        if (num_threads == 1 || piece.num_splits() == 1 || piece.cost() * num_threads * 4 <= total) {
            work.pieces.push_back(piece);
            continue;
        }
        piece.partial = work.num_partials;
        work.merges.push_back(piece);
        for (int64_t tile = piece.first_tile; tile < piece.end_tile;) {
            Piece part = piece;
            part.first_tile = tile;
            part.end_tile = tile = std::min((tile / SPLIT_TILES + 1) * SPLIT_TILES, piece.end_tile);
            part.partial = work.num_partials++;
            work.pieces.push_back(part);
        }
    }
    std::stable_sort(work.pieces.begin(), work.pieces.end(), [](const Piece& a, const Piece& b) { return a.cost() > b.cost(); });
    return work;
}

}  // namespace

template <typename T>
void paged_attention(const AttentionArgs<T>& args) {
    const int64_t width = args.num_heads * args.head_dim, num_tokens = args.query_start[args.num_requests];
    std::memset(static_cast<void*>(args.output + num_tokens * width), 0, (args.num_rows - num_tokens) * width * sizeof(T));
    const Work work = share(cut_into_pieces(args, omp_get_max_threads()), omp_get_max_threads());
    const int64_t num_pieces = int64_t(work.pieces.size()), num_merges = int64_t(work.merges.size());
    const int64_t partial_floats = Softmax::floats(max_rows(args), HeadSize<T>(args.head_dim).columns());
    static thread_local Scratch caller_scratch;  // memory only: nothing in it outlives a call
    float* partials = caller_scratch.take(work.num_partials * partial_floats);
#pragma omp parallel
    {
        static thread_local Scratch scratch;
        Worker<T> worker(args, scratch);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_pieces; ++i) worker.compute(work.pieces[i], partials, partial_floats);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_merges; ++i) worker.merge(work.merges[i], partials, partial_floats);
    }
}

template void paged_attention<float>(const AttentionArgs<float>&);
template void paged_attention<bf16>(const AttentionArgs<bf16>&);

}  // namespace kvrelay
