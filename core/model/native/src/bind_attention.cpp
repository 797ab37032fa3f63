// Python's view of attention.h: addresses, sizes and strides in, nothing out. Callers keep all memory, and the sizes right.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "attention.h"

namespace py = pybind11;

namespace kvrelay {
namespace {

template <typename T>
void bind_type(py::module_& module, const std::string& dtype) {
    module.def(
        ("paged_attention_" + dtype).c_str(),
        // query, output, key_cache, value_cache; block_tables, query_start, seq_lens; sizes as in AttentionArgs, in its order
        [](std::array<uintptr_t, 4> data, std::array<uintptr_t, 3> batch, std::array<int64_t, 9> sizes, int64_t sliding_window,
           float scale, float soft_cap) {
            const auto integers = [&](int i) { return reinterpret_cast<const int64_t*>(batch[i]); };
            paged_attention<T>({reinterpret_cast<const T*>(data[0]), reinterpret_cast<T*>(data[1]),
                                reinterpret_cast<const T*>(data[2]), reinterpret_cast<const T*>(data[3]), integers(0), integers(1),
                                integers(2), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8],
                                sliding_window, scale, soft_cap});
        },
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_attention(py::module_& module) {
    bind_type<float>(module, "float32");
    bind_type<bf16>(module, "bfloat16");
}

}  // namespace kvrelay
