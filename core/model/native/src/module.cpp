// The extension module. Each part binds itself, with addresses and sizes for tensors.
#include <pybind11/pybind11.h>

namespace kvrelay {
void bind_attention(pybind11::module_& module);
void bind_layers(pybind11::module_& module);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    // What decides how products are rounded: with dot products of pairs, with fused multiplications, or neither.
#if defined(__AVX512BF16__)
    module.attr("INSTRUCTIONS") = "bf16 dot products";
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    module.attr("INSTRUCTIONS") = "fused multiply-add";
#else
    module.attr("INSTRUCTIONS") = "separate multiply and add";
#endif
    kvrelay::bind_attention(module);
    kvrelay::bind_layers(module);
}
