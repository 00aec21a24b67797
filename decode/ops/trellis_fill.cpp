// Fills static trees for Markov heads on a CPU, in one operation: medusa::trellis_fill (decode/ops/trellis_fill.py).
//
// decode/drafters/trellis.py explains the trellis, and drafts the same trees by PyTorch's operations. Those compute
// whole tables of pairs. This file computes only the rows of the nodes that get children, which takes hardly longer
// than to start a few operations.
//
// Shapes: B texts, K heads (as many as the tree is deep), V tokens of the heads' vocabulary, M candidates of a head,
// N nodes, H hidden size, R rank of the path term.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kLanes = 32;
constexpr int64_t kMost = 256;  // values that are ranked at once

// How many of `size` values are larger than each of them; `size` is a multiple of kLanes. To compare all pairs is the
// fastest way to sort a few values, because no branch depends on them.
template <typename T>
void rank_all(const T* values, int64_t size, int32_t* ranks) {
    for (int64_t start = 0; start < size; start += kLanes) {
        const T* part = values + start;
        int32_t larger[kLanes] = {};
        for (int64_t k = 0; k < size; ++k) {
            const T value = values[k];
#pragma omp simd
            for (int64_t i = 0; i < kLanes; ++i) larger[i] += value > part[i];
        }
        std::copy(larger, larger + kLanes, ranks + start);
    }
}

// The `count` largest of `size` values and their indices, largest first, by insertion. Blocks without such values are
// skipped.
template <typename T>
void insert_all(const T* values, int64_t size, int64_t count, T* best, int32_t* places) {
    int64_t found = 0;
    for (int64_t start = 0; start < size; start += kLanes) {
        const int64_t end = std::min(start + kLanes, size);
        if (found == count && end - start == kLanes) {
            T most = values[start];
#pragma omp simd reduction(max : most)
            for (int64_t i = start; i < start + kLanes; ++i) most = values[i] > most ? values[i] : most;
            if (most <= best[count - 1]) continue;
        }
        for (int64_t i = start; i < end; ++i) {
            const T value = values[i];
            if (found == count && !(value > best[count - 1])) continue;
            int64_t at = found < count ? found++ : count - 1;
            for (; at > 0 && best[at - 1] < value; --at) {
                best[at] = best[at - 1];
                places[at] = places[at - 1];
            }
            best[at] = value;
            places[at] = static_cast<int32_t>(i);
        }
    }
}

// The same, faster for up to some thousands of values and a small `count`. Value i is in lane i mod kLanes. The largest
// value of each lane is found first, which compilers turn into vector instructions. The smallest of the `count` largest
// of these is a threshold. Few values reach it, and all of them are in the lanes whose largest value does.
template <typename T>
void search(const T* values, int64_t size, int64_t count, T* best, int32_t* places) {
    const int64_t rows = size / kLanes;
    if (rows < 2 || rows > kMost / 2 || count > kLanes / 2) return insert_all(values, size, count, best, places);
    T maxima[kLanes], reached[kMost + kLanes];
    int32_t ranks[kMost + kLanes], lanes[kLanes + 1], indices[kMost + kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) maxima[lane] = values[lane];
    for (int64_t i = kLanes; i < rows * kLanes; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
            maxima[lane] = values[i + lane] > maxima[lane] ? values[i + lane] : maxima[lane];
        }
    }
    rank_all(maxima, kLanes, ranks);
    int64_t chosen = 0, found = 0;
    T threshold = std::numeric_limits<T>::infinity();
    for (int64_t lane = 0; lane < kLanes; ++lane) {
        const bool large = ranks[lane] < count;
        lanes[chosen] = static_cast<int32_t>(lane);
        chosen += large;
        threshold = large && maxima[lane] < threshold ? maxima[lane] : threshold;
    }
    const auto keep = [&](int64_t i) {
        reached[found] = values[i];
        indices[found] = static_cast<int32_t>(i);
        found += values[i] >= threshold;
    };
    for (int64_t i = rows * kLanes; i < size; ++i) keep(i);
    for (int64_t k = 0; k < chosen && found + rows <= kMost; ++k) {
        for (int64_t i = lanes[k]; i < rows * kLanes; i += kLanes) keep(i);
    }
    if (found + rows > kMost) return insert_all(values, size, count, best, places);  // many equal values
    int64_t ranked = found;
    while (ranked % kLanes) reached[ranked++] = -std::numeric_limits<T>::infinity();
    rank_all(reached, ranked, ranks);
    bool taken[kLanes] = {};  // If values are NaN, fewer may be found. The other places keep older tokens.
    for (int64_t i = 0; i < found; ++i) {
        int64_t rank = ranks[i];
        while (rank < count && taken[rank]) ++rank;  // equal values
        if (rank >= count) continue;
        taken[rank] = true;
        best[rank] = reached[i];
        places[rank] = indices[i];
    }
}

template <typename T>
T dot(const T* a, const T* b, int64_t size) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += a[i] * b[i];
    return sum;
}

// gates[R] = sigmoid(bias[R] + hidden[H] weight[H, R])
template <typename T>
void gate(const T* hidden, const T* weight, const T* bias, int64_t size, int64_t rank, T* gates) {
    for (int64_t r = 0; r < rank; ++r) gates[r] = bias[r];
    for (int64_t h = 0; h < size; ++h) {
        const T value = hidden[h], *row = weight + h * rank;
#pragma omp simd
        for (int64_t r = 0; r < rank; ++r) gates[r] += value * row[r];
    }
    for (int64_t r = 0; r < rank; ++r) gates[r] = 1 / (1 + std::exp(-gates[r]));
}

// A tree of N nodes, which hold `ranks` among the best guesses after their parents. `tops` is the largest rank of a
// node's children plus 1; 0 for leaves, and for the root, whose guesses are in order.
struct Plan {
    int64_t nodes, most;  // most: the largest of tops
    const int64_t *parents, *depths, *ranks, *tops;
};

struct Sizes {
    int64_t heads, texts, tokens, size, rank, shortlist;
};

// `paths` [K V, 2 R]: of each head's tokens, the rows as a guess, and as the token before a guess of the next head.
template <typename T>
void fill(
    const Sizes& sizes, const Plan& plan, const int64_t* roots, const T* hidden, const T* logits, const T* weight,
    const T* bias, const T* paths, const int64_t* vocabulary, int64_t* ids) {
    const auto [heads, texts, tokens, size, rank, shortlist] = sizes;
    // The candidates of each head, and after each node the best candidates of the next head, in order.
    std::vector<T> best(heads * shortlist), gates(heads * rank), gated(rank), scores(shortlist), sorted(plan.most);
    std::vector<int32_t> candidates(heads * shortlist), order(plan.nodes * plan.most);
    std::vector<int64_t> chosen(plan.nodes);  // the place of each node's token among its head's candidates
    for (int64_t text = 0; text < texts; ++text, ids += plan.nodes) {
        for (int64_t k = 0; k < heads; ++k) {
            const T* row = logits + (k * texts + text) * tokens;
            search(row, tokens, shortlist, &best[k * shortlist], &candidates[k * shortlist]);
            for (int64_t m = 0; m < shortlist; ++m) {  // these rows are read soon, and are seldom in the CPU's caches
                const T* guess = paths + (k * tokens + candidates[k * shortlist + m]) * 2 * rank;
                const int64_t needed = m == 0 ? 2 * rank : rank;
                for (int64_t r = 0; r < needed; r += 64 / sizeof(T)) __builtin_prefetch(guess + r);
            }
        }
        for (int64_t k = 0; k + 1 < heads; ++k) {
            gate(hidden + text * size, weight + k * size * rank, bias + k * rank, size, rank, &gates[k * rank]);
        }
        ids[0] = roots[text];
        for (int64_t n = 1; n < plan.nodes; ++n) {
            const int64_t head = plan.depths[n] - 1;
            chosen[n] = head == 0 ? plan.ranks[n] : order[plan.parents[n] * plan.most + plan.ranks[n]];
            const int64_t token = candidates[head * shortlist + chosen[n]];
            ids[n] = vocabulary ? vocabulary[token] : token;
            if (plan.tops[n] == 0) continue;
            const T* before = paths + (head * tokens + token) * 2 * rank + rank;
            for (int64_t r = 0; r < rank; ++r) gated[r] = gates[head * rank + r] * before[r];
            for (int64_t m = 0; m < shortlist; ++m) {
                const int64_t guess = (head + 1) * shortlist + m;
                const T* row = paths + ((head + 1) * tokens + candidates[guess]) * 2 * rank;
                scores[m] = best[guess] + dot(gated.data(), row, rank);
            }
            insert_all(scores.data(), shortlist, plan.tops[n], sorted.data(), &order[n * plan.most]);
        }
    }
}

template <typename T>
const T* numbers(const Tensor& tensor, ScalarType type, int64_t dim) {
    STD_TORCH_CHECK(
        tensor.scalar_type() == type && tensor.is_contiguous() && tensor.dim() == dim,
        "trellis_fill: a tensor has another dtype or number of dimensions, or is not contiguous");
    return static_cast<const T*>(tensor.const_data_ptr());
}

// decode/ops/trellis_fill.py says what these are, with their shapes.
Tensor trellis_fill(
    Tensor root, Tensor hidden, Tensor logits, Tensor weight, Tensor bias, Tensor paths, Tensor plan,
    std::optional<Tensor> vocabulary, int64_t shortlist) {
    const int64_t *roots = numbers<int64_t>(root, ScalarType::Long, 1), *named = nullptr;
    if (vocabulary.has_value()) named = numbers<int64_t>(*vocabulary, ScalarType::Long, 1);
    const int64_t* planned = numbers<int64_t>(plan, ScalarType::Long, 2);
    STD_TORCH_CHECK(
        logits.dim() == 3 && hidden.dim() == 2 && weight.dim() == 3 && paths.dim() == 2 && plan.size(0) == 4 &&
            plan.size(1) > 0,
        "trellis_fill: a tensor has another number of dimensions");
    const Sizes sizes{logits.size(0), logits.size(1), logits.size(2), hidden.size(1), weight.size(2), shortlist};
    STD_TORCH_CHECK(
        root.size(0) == sizes.texts && hidden.size(0) == sizes.texts && weight.size(0) >= sizes.heads - 1 &&
            weight.size(1) == sizes.size && bias.numel() == weight.size(0) * sizes.rank &&
            paths.size(0) >= sizes.heads * sizes.tokens && paths.size(1) == 2 * sizes.rank &&
            (!named || vocabulary->size(0) == sizes.tokens) && shortlist > 0 && shortlist <= sizes.tokens,
        "trellis_fill: the shapes do not fit together");
    const int64_t nodes = plan.size(1);
    Plan tree{nodes, 1, planned, planned + nodes, planned + 2 * nodes, planned + 3 * nodes};
    for (int64_t n = 1; n < nodes; ++n) {
        const int64_t parent = tree.parents[n], depth = tree.depths[n];
        STD_TORCH_CHECK(
            parent >= 0 && parent < n && depth == (parent == 0 ? 1 : tree.depths[parent] + 1) && depth <= sizes.heads &&
                tree.ranks[n] >= 0 && tree.ranks[n] < (parent == 0 ? shortlist : tree.tops[parent]) &&
                tree.tops[n] >= 0 && tree.tops[n] <= (depth == sizes.heads ? 0 : shortlist),
            "trellis_fill: the plan is no tree for these heads");
        tree.most = std::max(tree.most, tree.tops[n]);
    }
    AtenTensorHandle made;
    const int64_t shape[] = {sizes.texts, nodes}, strides[] = {nodes, 1};
    const auto outcome = aoti_torch_empty_strided(
        2, shape, strides, aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(), 0, &made);
    STD_TORCH_CHECK(outcome == AOTI_TORCH_SUCCESS, "trellis_fill: no memory for the draft");
    Tensor ids(made);
    auto* out = static_cast<int64_t*>(ids.mutable_data_ptr());
    const auto run = [&]<typename T>(T, ScalarType type) {
        fill<T>(
            sizes, tree, roots, numbers<T>(hidden, type, 2), numbers<T>(logits, type, 3), numbers<T>(weight, type, 3),
            numbers<T>(bias, type, 3), numbers<T>(paths, type, 2), named, out);
    };
    logits.scalar_type() == ScalarType::Double ? run(double{}, ScalarType::Double) : run(float{}, ScalarType::Float);
    return ids;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(medusa, library) {
    library.def(
        "trellis_fill(Tensor root, Tensor hidden, Tensor logits, Tensor weight, Tensor bias, Tensor paths, Tensor plan, "
        "Tensor? vocabulary, int shortlist) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(medusa, CPU, library) { library.impl("trellis_fill", TORCH_BOX(&trellis_fill)); }
