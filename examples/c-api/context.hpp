#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <type_traits>

#include "heddle/core/error.hpp"
#include "heddle/core/scalar.hpp"
#include "heddle/core/view.hpp"
#include "heddle/core/workspace.hpp"
#include "heddle/gdn/layer_options.hpp"
#include "heddle_c.h"

struct heddle_context {
  std::string error;
  heddle::Workspace head_scratch;
  heddle::gdn::LayerScratch gdn_scratch;
};

namespace heddle_c {

/// Refuses a NULL among the structs of a call.
template <class T>
const T& given(const char* where, const char* argument, const T* value) {
  if (value == nullptr) {
    heddle::fail(where, argument, nullptr, "required");
  }
  return *value;
}

/// Runs a call's body: no exception crosses the border.
template <class Body>
heddle_status guarded(heddle_context* context, const Body& body) noexcept {
  if (context == nullptr) {
    return HEDDLE_WRONG_INPUT;
  }
  try {
    context->error.clear();
    try {
      body();
      return HEDDLE_OK;
    } catch (const heddle::Error& error) {
      context->error = error.what();
      return HEDDLE_WRONG_INPUT;
    } catch (const std::exception& error) {
      context->error = error.what();
    }
  } catch (...) {
    // No memory even for the message.
  }
  return HEDDLE_FAILED;
}

/// Calls body with a value of the type that `storage` names.
template <class Body>
void with_storage(const char* where, heddle_storage storage, const Body& body) {
  switch (storage) {
    case HEDDLE_F32:
      return body(float{});
    case HEDDLE_BF16:
      return body(heddle::bfloat16{});
  }
  heddle::fail(where, "inputs.storage", storage, "must be HEDDLE_F32 or HEDDLE_BF16");
}

inline heddle::Write write_of(const char* where, const char* argument, heddle_write write) {
  switch (write) {
    case HEDDLE_OVERWRITE:
      return heddle::Write::overwrite;
    case HEDDLE_ACCUMULATE:
      return heddle::Write::accumulate;
  }
  heddle::fail(where, argument, write, "must be HEDDLE_OVERWRITE or HEDDLE_ACCUMULATE");
}

/// [rows, cols] at `data`, null where that is.
template <class T, class Data>
heddle::MatrixView<T> matrix(Data* data, std::int64_t rows, std::int64_t cols) {
  return data == nullptr ? heddle::MatrixView<T>{}
                         : heddle::MatrixView<T>(static_cast<T*>(data), rows, cols);
}

/// The same for an array that must be there: its absence is the kernel's to refuse.
template <class T, class Data>
heddle::MatrixView<T> required_matrix(Data* data, std::int64_t rows, std::int64_t cols) {
  return {static_cast<T*>(data), rows, cols};
}

/// [count] at `data`, empty where that is null.
template <class T, class Data>
std::span<T> vector(Data* data, std::int64_t count) {
  return data == nullptr || count < 0
             ? std::span<T>{}
             : std::span<T>(static_cast<T*>(data), static_cast<std::size_t>(count));
}

}  // namespace heddle_c
