// Orders of samples and blends, and samples' tokens, item for item those of the numpy functions of the same names.
//
// Built when the package is installed, if there is a compiler; nothing needs it. Compiled with -ffp-contract=off: a
// fused multiply-add would decide ties of a blend in another way than IEEE multiplication and subtraction do.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
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

// A one-dimensional, contiguous array of T, without a copy.
template <typename T>
struct Span {
  T* data;
  int64_t size;

  Span(const py::buffer& buffer, const char* name, bool writable = false) {
    py::buffer_info info = buffer.request(writable);
    if (info.itemsize != sizeof(T)) throw std::invalid_argument(std::string(name) + " has another item size");
    check_contiguous(info, name);
    data = static_cast<T*>(info.ptr);
    size = info.size;
  }
};

// ---------------------------------------------------------------- shuffling

void shuffle(MersenneTwister& random, const py::buffer& values) {
  py::buffer_info info = values.request(true);
  if (info.itemsize == 4) {
    Span<uint32_t> span(values, "values", true);
    py::gil_scoped_release unlocked;
    shuffle_array(span.data, span.size, random);
  } else {
    Span<uint64_t> span(values, "values", true);
    py::gil_scoped_release unlocked;
    shuffle_array(span.data, span.size, random);
  }
}

// ---------------------------------------------------------------- places of samples

template <typename T>
void fill_starts(T* starts, int64_t rows, const int32_t* stream, int64_t num_documents, const int32_t* sizes,
                 int64_t seq_length) {
  int64_t begin = 0, position = seq_length, row = 1;
  starts[0] = starts[1] = 0;
  for (int64_t document = 0; document < num_documents && row < rows; ++document) {
    int64_t end = begin + sizes[stream[document]];
    // Whether a sample begins here is a coin's toss to the processor: the row is written, and counts if it does.
    bool begins_here;
    do {
      starts[2 * row] = static_cast<T>(document);
      starts[2 * row + 1] = static_cast<T>(position - begin);
      begins_here = position < end;
      row += begins_here;
      position += begins_here ? seq_length : 0;
    } while (position < end && row < rows);
    begin = end;
  }
  if (row < rows) throw std::invalid_argument("the documents hold fewer tokens than the samples need");
}

void sample_starts(const py::buffer& stream, const py::buffer& sizes, const py::buffer& starts, int64_t seq_length) {
  Span<const int32_t> documents(stream, "stream"), lengths(sizes, "sizes");
  py::buffer_info info = starts.request(true);
  int64_t rows = info.shape.at(0);
  if (info.itemsize == 4) {
    Span<int32_t> out(starts, "starts", true);
    py::gil_scoped_release unlocked;
    fill_starts(out.data, rows, documents.data, documents.size, lengths.data, seq_length);
  } else {
    Span<int64_t> out(starts, "starts", true);
    py::gil_scoped_release unlocked;
    fill_starts(out.data, rows, documents.data, documents.size, lengths.data, seq_length);
  }
}

int64_t count_tokens(const py::buffer& documents, const py::buffer& sizes) {
  Span<const int32_t> numbers(documents, "documents"), lengths(sizes, "sizes");
  py::gil_scoped_release unlocked;
  int64_t tokens = 0;
  for (int64_t i = 0; i < numbers.size; ++i) tokens += lengths.data[numbers.data[i]];
  return tokens;
}

// ---------------------------------------------------------------- reading samples

// Holds on to the arrays that it reads, from any number of threads.
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
    arrays_.units_per_token = arrays_.tokens.token_bytes / place_bytes;
    if (arrays_.places.size != arrays_.sizes.size) throw std::invalid_argument("places and sizes must have one length");
  }

  py::object read(int64_t item) const {
    py::array_t<int64_t> tokens(length_);
    int64_t* out = tokens.mutable_data();
    bool is_read;
    {
      // The first look at a part of a file waits for the disk.
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
void blend_into(const Span<const double>& weights, const py::buffer& order, int64_t* taken_before, int64_t block,
                int64_t most_scanned, int64_t most_lanes) {
  Span<T> items(order, "order", true);
  py::gil_scoped_release unlocked;
  if (weights.size <= most_scanned)
    blend_by_scanning(weights.data, weights.size, items.data, items.size, taken_before, block, most_lanes);
  else
    blend_by_tournament(weights.data, weights.size, items.data, items.size, taken_before, block);
}

void blend_order(const py::buffer& weights, const py::buffer& order, const py::buffer& taken_before, int64_t block,
                 int64_t most_scanned, int64_t most_lanes) {
  Span<const double> shares(weights, "weights");
  Span<int64_t> taken(taken_before, "taken_before", true);
  py::buffer_info info = order.request(true);
  if (shares.size < 1 || block < 1 || taken.size != (info.size / block + 1) * shares.size)
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
