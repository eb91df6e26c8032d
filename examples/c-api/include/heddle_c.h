/* Heddle's head and Gated Delta Net layer for hosts that speak C.
 *
 * Arrays are row-major and without gaps, in memory that the caller owns; the contract of each is that of
 * the C++ function of the same name (heddle/head/chunked_head.hpp, heddle/gdn/layer.hpp). NULL means "none"
 * where an input, and "not wanted" where an output is optional.
 *
 * A call returns HEDDLE_OK, or says why not in heddle_error() and, where the input was wrong, has written
 * nothing. A context keeps scratch from call to call: one for each thread that calls. */
#ifndef HEDDLE_C_H
#define HEDDLE_C_H

#include <stdint.h>

#if defined(__GNUC__)
#define HEDDLE_C_API __attribute__((visibility("default")))
#else
#define HEDDLE_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum heddle_status {
  HEDDLE_OK = 0,
  HEDDLE_WRONG_INPUT = 1, /* an argument breaks a rule that heddle_error() names */
  HEDDLE_FAILED = 2       /* anything else, such as no memory */
} heddle_status;

/* What the arrays of type `const void*` hold. An integer of known size, not an enum: a host may pass any. */
typedef int32_t heddle_storage;
enum {
  HEDDLE_F32 = 0,
  HEDDLE_BF16 = 1 /* the upper 16 bits of an f32 */
};

/* What a call does with the memory of a parameter's cotangent. */
typedef int32_t heddle_write;
enum {
  HEDDLE_OVERWRITE = 0,
  HEDDLE_ACCUMULATE = 1 /* every element is added to */
};

typedef struct heddle_context heddle_context;

/* NULL where there is no memory. */
HEDDLE_C_API heddle_context* heddle_create(void);
/* NULL is legal. */
HEDDLE_C_API void heddle_destroy(heddle_context* context);
/* One line about the last call that did not return HEDDLE_OK; valid until the next call. */
HEDDLE_C_API const char* heddle_error(const heddle_context* context);

/* ---- head: log-prob of each row's target and entropy of its softmax, in nats ---- */

typedef struct heddle_head_dims {
  int64_t tokens, hidden, vocab;
} heddle_head_dims;

typedef struct heddle_head_inputs {
  heddle_storage storage;
  const void* hidden;        /* [tokens, hidden] */
  const void* weight;        /* [hidden, vocab] */
  const int32_t* target_ids; /* [tokens], the token that the row predicts */
  const uint8_t* active;     /* [tokens], 0 or not; NULL: every row */
  double temperature;        /* divides the logits; 0 and 1: none */
} heddle_head_inputs;

/* Each [tokens], 0 at inactive rows; logps is required, the last three are what a backward call reads. */
typedef struct heddle_head_outputs {
  float *logps, *entropy, *max, *exp_sum, *mean;
} heddle_head_outputs;

typedef struct heddle_head_cotangents {
  const float *max, *exp_sum, *mean; /* as the forward call wrote them; mean only with d_entropy */
  const float* d_logps;              /* [tokens] */
  const float* d_entropy;            /* [tokens]; NULL: zeros */
  float* d_hidden;                   /* [tokens, hidden]; NULL: not wanted */
  float* d_weight;                   /* [hidden, vocab]; NULL: not wanted */
  heddle_write d_weight_write;
} heddle_head_cotangents;

HEDDLE_C_API heddle_status heddle_head_forward(heddle_context* context,
                                               const heddle_head_dims* dims,
                                               const heddle_head_inputs* inputs,
                                               const heddle_head_outputs* outputs);
HEDDLE_C_API heddle_status heddle_head_backward(heddle_context* context,
                                                const heddle_head_dims* dims,
                                                const heddle_head_inputs* inputs,
                                                const heddle_head_cotangents* cotangents);

/* ---- gdn: the Gated Delta Net layer over a row of packed documents ---- */

typedef struct heddle_gdn_dims {
  int64_t tokens, key_heads, value_heads, key_dim, value_dim, kernel;
} heddle_gdn_dims;

/* C = 2 key_heads key_dim + value_heads value_dim columns of qkv. */
typedef struct heddle_gdn_inputs {
  heddle_storage storage;
  const void* qkv;              /* [tokens, C], before the convolution */
  const void* conv_weight;      /* [C, kernel], the last tap the current token */
  const void* conv_bias;        /* [C]; NULL: none */
  const void *a, *b;            /* [tokens, value_heads] */
  const float *A_log, *dt_bias; /* [value_heads] */
  const int32_t* segment_ids;   /* [tokens], > 0 a document, 0 padding */
  const void* conv_state;       /* [kernel - 1, C]; NULL: no earlier token */
  const float* recurrent_state; /* [value_heads key_dim, value_dim]; NULL: zeros */
  int32_t initial_segment;      /* the document that the states belong to; 0: none */
} heddle_gdn_inputs;

typedef struct heddle_gdn_outputs {
  void* o;                      /* [tokens, value_heads value_dim], in the inputs' storage */
  void* final_conv_state;       /* as conv_state; NULL: not wanted */
  float* final_recurrent_state; /* as recurrent_state; NULL: not wanted */
} heddle_gdn_outputs;

typedef struct heddle_gdn_cotangents {
  const void* d_o;                                          /* as o */
  const float* d_final_conv_state;                          /* NULL: zeros */
  const float* d_final_recurrent_state;                     /* NULL: zeros */
  float *d_qkv, *d_a, *d_b;                                 /* required */
  float *d_conv_weight, *d_conv_bias, *d_A_log, *d_dt_bias; /* NULL: not wanted */
  heddle_write parameters_write;
  float *d_conv_state, *d_recurrent_state; /* NULL: not wanted; only where the state is given */
} heddle_gdn_cotangents;

HEDDLE_C_API heddle_status heddle_gdn_forward(heddle_context* context, const heddle_gdn_dims* dims,
                                              const heddle_gdn_inputs* inputs,
                                              const heddle_gdn_outputs* outputs);
HEDDLE_C_API heddle_status heddle_gdn_backward(heddle_context* context, const heddle_gdn_dims* dims,
                                               const heddle_gdn_inputs* inputs,
                                               const heddle_gdn_cotangents* cotangents);

#ifdef __cplusplus
}
#endif

#endif
