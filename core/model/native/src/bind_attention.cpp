// Python's view of attention.h: addresses and sizes in, nothing out. Callers keep all memory, and the sizes right.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "attention.h"

namespace py = pybind11;

namespace kvrelay {
namespace {

using Address = uintptr_t;

template <typename T>
void bind_type(py::module_& module, const std::string& dtype) {
    module.def(
        ("attend_" + dtype).c_str(),
        [](const BatchPlan& plan, Address query, Address output, Address key_cache, Address value_cache,
           std::array<int64_t, 5> sizes, float scale, float soft_cap, int64_t sliding_window) {
            const auto [num_heads, num_kv_heads, head_dim, block_stride, token_stride] = sizes;
            attend<T>(plan, {reinterpret_cast<const T*>(query), reinterpret_cast<T*>(output),
                             reinterpret_cast<const T*>(key_cache), reinterpret_cast<const T*>(value_cache), num_heads,
                             num_kv_heads, head_dim, block_stride, token_stride, scale, soft_cap, sliding_window});
        },
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_attention(py::module_& module) {
    py::class_<BatchPlan>(module, "BatchPlan")
        .def(py::init([](Address block_tables, Address query_start, Address seq_lens, int64_t num_requests, int64_t max_blocks,
                         int64_t block_size) {
            return BatchPlan{reinterpret_cast<const int64_t*>(block_tables), reinterpret_cast<const int64_t*>(query_start),
                             reinterpret_cast<const int64_t*>(seq_lens), num_requests, max_blocks, block_size};
        }));
    bind_type<float>(module, "float32");
    bind_type<bf16>(module, "bfloat16");
}

}  // namespace kvrelay
