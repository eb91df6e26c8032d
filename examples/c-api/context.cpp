#include "context.hpp"

#include <new>

heddle_context* heddle_create(void) {
  return new (std::nothrow) heddle_context();
}

void heddle_destroy(heddle_context* context) {
  delete context;
}

const char* heddle_error(const heddle_context* context) {
  return context == nullptr ? "context = null: required" : context->error.c_str();
}
