// Python's view of linear.h and layers.h: addresses and sizes in, nothing out. Callers keep all memory, and the sizes right.
// Binds without torch's headers, which take half a minute to compile.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>

#include "layers.h"

namespace py = pybind11;

namespace kvrelay {
namespace {

using Address = uintptr_t;

template <typename P>
P* at(Address address) {
    return reinterpret_cast<P*>(address);
}

template <typename T>
void bind_type(py::module_& module, const std::string& dtype) {
    using Weight = PackedWeight<T>;
    const auto unlocked = py::call_guard<py::gil_scoped_release>();
    py::class_<Weight>(module, ("PackedWeight_" + dtype).c_str())
        .def(py::init([](Address panels, Address bias, int64_t num_inputs, int64_t num_outputs) {
            return Weight{at<T>(panels), at<T>(bias), num_inputs, num_outputs};
        }));
    module.def(
        "linear",
        [](const Weight& weight, Address inputs, Address outputs, int64_t num_rows, bool is_float32) {
            if (is_float32) linear<T, float>(weight, at<T>(inputs), nullptr, at<float>(outputs), num_rows);
            else linear<T, T>(weight, at<T>(inputs), nullptr, at<T>(outputs), num_rows);
        },
        unlocked);
    module.def(
        "linear_onto",
        [](const Weight& weight, Address inputs, Address hidden, int64_t num_rows) {
            linear<T, T>(weight, at<T>(inputs), at<T>(hidden), at<T>(hidden), num_rows);
        },
        unlocked);
    module.def(
        "norm_linear",
        [](const Weight& weight, Address inputs, Address norm_weight, float epsilon, Address normed, Address outputs, int64_t num_rows) {
            norm_linear<T>(weight, at<T>(inputs), at<T>(norm_weight), epsilon, at<T>(normed), at<T>(outputs), num_rows);
        },
        unlocked);
    module.def(
        "feed_forward",
        [](const Weight& gate_up_weight, const Weight& down_weight, Address norm_weight, float epsilon, Address hidden,
           Address normed, Address gate_up, Address activated, int64_t num_rows) {
            feed_forward<T>(gate_up_weight, down_weight, at<T>(norm_weight), epsilon, at<T>(hidden), at<T>(normed), at<T>(gate_up),
                            at<T>(activated), num_rows);
        },
        unlocked);
    module.def(
        ("norm_" + dtype).c_str(),
        [](Address inputs, Address weight, Address outputs, int64_t num_rows, int64_t size, float epsilon) {
            norm<T>(at<T>(inputs), at<T>(weight), at<T>(outputs), num_rows, size, epsilon);
        },
        unlocked);
    module.def(
        ("activate_" + dtype).c_str(),
        [](Address gate_up, Address outputs, int64_t num_rows, int64_t size) {
            activate<T>(at<T>(gate_up), at<T>(outputs), num_rows, size);
        },
        unlocked);
    module.def(
        ("rotate_and_store_" + dtype).c_str(),
        [](Address qkv, Address query, Address positions, Address cos, Address sin, Address key_cache, Address value_cache,
           Address slots, std::array<int64_t, 8> sizes) {
            const auto [num_rows, num_slots, num_heads, num_kv_heads, head_dim, block_size, block_stride, token_stride] = sizes;
            rotate_and_store<T>({at<T>(qkv), at<T>(query), at<int64_t>(positions), at<float>(cos), at<float>(sin), at<T>(key_cache),
                                 at<T>(value_cache), at<int64_t>(slots), num_rows, num_slots, num_heads, num_kv_heads, head_dim,
                                 block_size, block_stride, token_stride});
        },
        unlocked);
}

}  // namespace

void bind_layers(py::module_& module) {
    bind_type<float>(module, "float32");
    bind_type<bf16>(module, "bfloat16");
}

}  // namespace kvrelay
