// Arguments of a call from Python: turned into those of operators.h, or refused before anything is launched.
//
// An address alone does not tell what it points to. What can be checked is: sizes are not negative and their products do
// not overflow, codes are known, and the address of a tensor with elements is not null and is a multiple of its element's
// size. An error starts with the name of the operator.

#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "operators.h"

namespace neox {

using Address = uintptr_t;
using ParameterCode = std::pair<Address, int>;  // address (0 for None), dtype code

class Call {
 public:
  Call(const char* name, int device) : name_(name) {
    require(device >= 0, "device is " + std::to_string(device));
    where_.device = device;
  }

  Call(const char* name, int device, Address stream, int dtype) : Call(name, device) {
    where_.stream = stream;
    dtype_ = dtype_of(dtype);
  }

  const Launch& where() const { return where_; }
  Dtype dtype() const { return dtype_; }

  void require(bool is_right, const std::string& problem) const {
    if (!is_right) {
      throw std::invalid_argument(std::string(name_) + ": " + problem);
    }
  }

  Dtype dtype_of(int code) const {
    require(code >= 0 && code <= 2, "unknown dtype code " + std::to_string(code));
    return static_cast<Dtype>(code);
  }

  // The product of sizes.
  int64_t count(std::initializer_list<int64_t> sizes) const {
    int64_t product = 1;
    for (const int64_t size : sizes) {
      require(size >= 0, "a size is " + std::to_string(size));
      require(!__builtin_mul_overflow(product, size, &product) && product < (int64_t{1} << 60),
              "the sizes exceed what a device holds");
    }
    return product;
  }

  // A tensor of this many elements of the call's type, or of elements of so many bytes.
  template <typename T = void>
  const T* read(const char* tensor, Address address, int64_t elements, int64_t itemsize = 0) const {
    return pointer<T>(tensor, address, elements, itemsize);
  }

  template <typename T = void>
  T* written(const char* tensor, Address address, int64_t elements, int64_t itemsize = 0) const {
    return pointer<T>(tensor, address, elements, itemsize);
  }

  // A weight or bias; it may be None.
  Parameter parameter(const char* tensor, const ParameterCode& code) const {
    const Dtype of_parameter = dtype_of(code.second);
    return {pointer<void>(tensor, code.first, 0, itemsize_of(of_parameter)), of_parameter};
  }

  ParameterGradient gradient(const char* tensor, const ParameterCode& code) const {
    const Dtype of_parameter = dtype_of(code.second);
    return {pointer<void>(tensor, code.first, 0, itemsize_of(of_parameter)), of_parameter};
  }

  void required(const char* tensor, const ParameterCode& code, int64_t elements) const {
    require(code.first != 0 || elements == 0, std::string(tensor) + " has no address");
  }

  // Scratch memory for sums over rows; null if `is_needed` is false.
  float* partials(Address address, int64_t partial_rows, int64_t columns, bool is_needed = true) const {
    if (!is_needed) {
      require(address == 0, "there is nothing to sum, but partials have an address");
      return nullptr;
    }
    require(partial_rows >= 1 && partial_rows <= 65535, "partial_rows is " + std::to_string(partial_rows));
    return written<float>("partials", address, count({partial_rows, columns}), 4);
  }

  // Calls the operator; an error of CUDA gets its name.
  template <typename Body>
  auto run(Body body) const {
    try {
      return body();
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(std::string(name_) + ": " + error.what());
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string(name_) + ": " + error.what());
    }
  }

 private:
  static int64_t itemsize_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

  template <typename T>
  T* pointer(const char* tensor, Address address, int64_t elements, int64_t itemsize) const {
    const int64_t size = itemsize == 0 ? itemsize_of(dtype_) : itemsize;
    require(address != 0 || elements == 0, std::string(tensor) + " has no address");
    require(address % static_cast<Address>(size) == 0,
            std::string(tensor) + " is not aligned to its elements of " + std::to_string(size) + " bytes");
    return reinterpret_cast<T*>(address);
  }

  const char* name_;
  Launch where_ = {};
  Dtype dtype_ = Dtype::float32;
};

}  // namespace neox
