// The extension module. Each part binds itself, with addresses and sizes for tensors.
#include <pybind11/pybind11.h>

namespace kvrelay {
void bind_layers(pybind11::module_& module);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    kvrelay::bind_layers(module);
}
