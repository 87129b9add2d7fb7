// Orders of samples and blends, and tokens of samples; results are identical to the numpy functions of the same names.
//
// Optional: compiled at installation if there is a compiler, with -ffp-contract=off: a fused multiply-add would
// decide ties of a blend differently from IEEE multiplication and subtraction.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "sample_reader.h"
#include "scan.h"
#include "shuffle.h"
#include "tournament.h"

namespace py = pybind11;

namespace {

void check_contiguous(const py::buffer_info& info, const char* name) {
  int64_t expected = info.itemsize;
  for (int64_t axis = info.ndim - 1; axis >= 0; --axis) {
    if (info.shape[axis] > 1 && info.strides[axis] != expected)
      throw std::invalid_argument(std::string(name) + " is not contiguous");
    expected *= info.shape[axis];
  }
}

// An array of T that is read, contiguous and at any address, without a copy.
template <typename T>
struct Input {
  const char* data;
  int64_t size;

  Input(const py::buffer& buffer, const char* name) {
    py::buffer_info info = buffer.request();
    if (info.itemsize != sizeof(T)) throw std::invalid_argument(std::string(name) + " has another item size");
    check_contiguous(info, name);
    data = static_cast<const char*>(info.ptr);
    size = info.size;
  }

  T operator[](int64_t i) const { return load<T>(data, i); }
};

// An array of T that is written, contiguous and aligned, without a copy.
template <typename T>
struct Output {
  T* data;
  int64_t size;

  Output(const py::buffer& buffer, const char* name) {
    py::buffer_info info = buffer.request(true);
    if (info.itemsize != sizeof(T)) throw std::invalid_argument(std::string(name) + " has another item size");
    check_contiguous(info, name);
    if (reinterpret_cast<uintptr_t>(info.ptr) % alignof(T))
      throw std::invalid_argument(std::string(name) + " is not aligned");
    data = static_cast<T*>(info.ptr);
    size = info.size;
  }
};

// The number of tokens of document `i` of a stream; the numbers come from a file or from a caller.
int64_t tokens_of(const Input<int32_t>& stream, int64_t i, const Input<int32_t>& sizes) {
  const int64_t document = stream[i];
  if (document < 0 || document >= sizes.size)
    throw std::out_of_range("document " + std::to_string(document) + " of " + std::to_string(sizes.size));
  return sizes[document];
}

// ---------------------------------------------------------------- shuffling

void shuffle(MersenneTwister& random, const py::buffer& values) {
  py::buffer_info info = values.request(true);
  if (info.itemsize == 4) {
    Output<uint32_t> array(values, "values");
    py::gil_scoped_release unlocked;
    shuffle_array(array.data, array.size, random);
  } else {
    Output<uint64_t> array(values, "values");
    py::gil_scoped_release unlocked;
    shuffle_array(array.data, array.size, random);
  }
}

// ---------------------------------------------------------------- places of samples

template <typename T>
void fill_starts(const py::buffer& buffer, const Input<int32_t>& stream, const Input<int32_t>& sizes,
                 int64_t seq_length) {
  Output<T> starts(buffer, "starts");
  const int64_t rows = starts.size / 2;
  if (rows < 1 || starts.size % 2 || seq_length < 1)
    throw std::invalid_argument("starts must have rows of two numbers, and seq_length must be at least 1");
  py::gil_scoped_release unlocked;
  T* out = starts.data;
  int64_t begin = 0, position = seq_length, row = 1;
  out[0] = out[1] = 0;
  for (int64_t document = 0; document < stream.size && row < rows; ++document) {
    int64_t end = begin + tokens_of(stream, document, sizes);
    // Branch-free, because the branch is unpredictable: always write the row, advance only if a sample begins here.
    bool begins_here;
    do {
      out[2 * row] = static_cast<T>(document);
      out[2 * row + 1] = static_cast<T>(position - begin);
      begins_here = position < end;
      row += begins_here;
      position += begins_here ? seq_length : 0;
    } while (position < end && row < rows);
    begin = end;
  }
  if (row < rows) throw std::invalid_argument("the documents contain fewer tokens than the samples require");
}

void sample_starts(const py::buffer& stream, const py::buffer& sizes, const py::buffer& starts, int64_t seq_length) {
  Input<int32_t> documents(stream, "stream"), lengths(sizes, "sizes");
  if (starts.request(true).itemsize == 4)
    fill_starts<int32_t>(starts, documents, lengths, seq_length);
  else
    fill_starts<int64_t>(starts, documents, lengths, seq_length);
}

int64_t count_tokens(const py::buffer& documents, const py::buffer& sizes) {
  Input<int32_t> numbers(documents, "documents"), lengths(sizes, "sizes");
  py::gil_scoped_release unlocked;
  int64_t tokens = 0;
  for (int64_t i = 0; i < numbers.size; ++i) tokens += tokens_of(numbers, i, lengths);
  return tokens;
}

// ---------------------------------------------------------------- reading samples

// Keeps references to the arrays that it reads; may be used by several threads.
class SampleReader {
 public:
  SampleReader(const py::buffer& tokens, bool is_signed, const py::buffer& places, int64_t place_bytes,
               const py::buffer& sizes, const py::buffer& documents, const py::buffer& starts, const py::buffer& shuffle,
               int64_t length)
      : length_(length) {
    arrays_.tokens = {nullptr, 0, 0, is_signed};
    hold(tokens, "tokens", arrays_.tokens.data, arrays_.tokens.size, arrays_.tokens.token_bytes);
    arrays_.places = numbers<int32_t>(places, "places");
    arrays_.sizes = numbers<int32_t>(sizes, "sizes");
    arrays_.documents = numbers<int32_t>(documents, "documents");
    arrays_.starts = numbers<int32_t>(starts, "starts");
    arrays_.shuffle = numbers<uint32_t>(shuffle, "shuffle");
    const int64_t token_bytes = arrays_.tokens.token_bytes;
    if (token_bytes != 1 && token_bytes != 2 && !(is_signed && (token_bytes == 4 || token_bytes == 8)))
      throw std::invalid_argument("tokens have an unsupported type");
    if (place_bytes < 1 || token_bytes % place_bytes) throw std::invalid_argument("place_bytes must divide the bytes of a token");
    if (length < 1) throw std::invalid_argument("length must be at least 1");
    arrays_.units_per_token = token_bytes / place_bytes;
    if (arrays_.places.size != arrays_.sizes.size) throw std::invalid_argument("places and sizes must have one length");
  }

  py::object read(int64_t item) const {
    py::array_t<int64_t> tokens(length_);
    int64_t* out = tokens.mutable_data();
    bool is_read;
    {
      // The first access to a page of a file waits for the disk.
      py::gil_scoped_release unlocked;
      is_read = arrays_.read(item, out, length_);
    }
    return is_read ? py::object(tokens) : py::none();
  }

 private:
  void hold(const py::buffer& buffer, const char* name, const char*& data, int64_t& size, int64_t& item_bytes) {
    held_.push_back(buffer.request());
    const py::buffer_info& info = held_.back();
    check_contiguous(info, name);
    data = static_cast<const char*>(info.ptr);
    size = info.size;
    item_bytes = info.itemsize;
  }

  template <typename Small>
  Numbers<Small> numbers(const py::buffer& buffer, const char* name) {
    Numbers<Small> result{};
    int64_t item_bytes;
    hold(buffer, name, result.data, result.size, item_bytes);
    if (item_bytes != 4 && item_bytes != 8) throw std::invalid_argument(std::string(name) + " has another item size");
    result.is_small = item_bytes == 4;
    return result;
  }

  SampleArrays arrays_;
  int64_t length_;
  std::vector<py::buffer_info> held_;
};

// ---------------------------------------------------------------- blending

template <typename T>
void blend_into(const std::vector<double>& weights, const py::buffer& order, int64_t* taken_before, int64_t block,
                int64_t most_scanned, int64_t most_lanes) {
  Output<T> items(order, "order");
  const int64_t num_datasets = weights.size();
  if (num_datasets - 1 > static_cast<int64_t>(std::numeric_limits<T>::max()))
    throw std::invalid_argument("order cannot hold the number of the last dataset");
  py::gil_scoped_release unlocked;
  if (num_datasets <= most_scanned)
    blend_by_scanning(weights.data(), num_datasets, items.data, items.size, taken_before, block, most_lanes);
  else
    blend_by_tournament(weights.data(), num_datasets, items.data, items.size, taken_before, block);
}

void blend_order(const py::buffer& weights, const py::buffer& order, const py::buffer& taken_before, int64_t block,
                 int64_t most_scanned, int64_t most_lanes) {
  Input<double> given(weights, "weights");
  std::vector<double> shares(given.size);
  for (int64_t j = 0; j < given.size; ++j) shares[j] = given[j];
  // With a NaN, no deficit would equal the largest one.
  if (!std::all_of(shares.begin(), shares.end(), [](double share) { return std::isfinite(share); }))
    throw std::invalid_argument("weights must be finite");
  Output<int64_t> taken(taken_before, "taken_before");
  py::buffer_info info = order.request(true);
  if (given.size < 1 || block < 1 || taken.size != (info.size / block + 1) * given.size)
    throw std::invalid_argument("taken_before must have a row for each block and a column for each weight");
  if (info.itemsize == 1)
    blend_into<uint8_t>(shares, order, taken.data, block, most_scanned, most_lanes);
  else if (info.itemsize == 2)
    blend_into<uint16_t>(shares, order, taken.data, block, most_scanned, most_lanes);
  else
    blend_into<uint32_t>(shares, order, taken.data, block, most_scanned, most_lanes);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  py::class_<MersenneTwister>(module, "MersenneTwister")
      .def(py::init<uint32_t>(), py::arg("seed"))
      .def("shuffle", &shuffle, py::arg("values"));
  module.def("count_tokens", &count_tokens, py::arg("documents"), py::arg("sizes"));
  module.def("sample_starts", &sample_starts, py::arg("stream"), py::arg("sizes"), py::arg("starts"),
             py::arg("seq_length"));
  py::class_<SampleReader>(module, "SampleReader")
      .def(py::init<const py::buffer&, bool, const py::buffer&, int64_t, const py::buffer&, const py::buffer&,
                    const py::buffer&, const py::buffer&, int64_t>(),
           py::arg("tokens"), py::arg("is_signed"), py::arg("places"), py::arg("place_bytes"), py::arg("sizes"),
           py::arg("documents"), py::arg("starts"), py::arg("shuffle"), py::arg("length"))
      .def("read", &SampleReader::read, py::arg("item"));
  module.def("blend_order", &blend_order, py::arg("weights"), py::arg("order"), py::arg("taken_before"),
             py::arg("block"), py::arg("most_scanned"), py::arg("most_lanes") = 8);
}
