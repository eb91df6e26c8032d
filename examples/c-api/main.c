/* Scores a row of two packed documents in C: log-probs of the next tokens and their cotangents, then a
 * Gated Delta Net layer over the same row, all in memory that this program owns. */
#include <stdio.h>
#include <stdlib.h>

#include "heddle_c.h"

enum {
  TOKENS = 6,
  HIDDEN = 4,
  VOCAB = 8,
  KEY_HEADS = 1,
  VALUE_HEADS = 2,
  KEY_DIM = 2,
  VALUE_DIM = 2,
  KERNEL = 4,
  COLUMNS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
};

/* Some numbers in [-1, 1). */
static void fill(float* values, int count, unsigned seed) {
  for (int i = 0; i < count; ++i) {
    seed = seed * 1664525U + 1013904223U;
    values[i] = (float)(seed >> 8) / 8388608.0F - 1.0F;
  }
}

static void check(const heddle_context* context, heddle_status status) {
  if (status != HEDDLE_OK) {
    fprintf(stderr, "c-api: %s\n", heddle_error(context));
    exit(status == HEDDLE_WRONG_INPUT ? 2 : 1);
  }
}

static void score(heddle_context* context) {
  static float hidden[TOKENS * HIDDEN], weight[HIDDEN * VOCAB], d_hidden[TOKENS * HIDDEN];
  static float logps[TOKENS], entropy[TOKENS], max[TOKENS], exp_sum[TOKENS], d_logps[TOKENS];
  const int32_t target_ids[TOKENS] = {3, 1, 0, 7, 2, 0};
  const uint8_t active[TOKENS] = {1, 1, 0, 1, 1, 0}; /* a document's last token predicts nothing */
  fill(hidden, TOKENS * HIDDEN, 1);
  fill(weight, HIDDEN * VOCAB, 2);
  for (int t = 0; t < TOKENS; ++t) {
    d_logps[t] = -0.25F; /* of the mean loss over the four that count */
  }

  const heddle_head_dims dims = {.tokens = TOKENS, .hidden = HIDDEN, .vocab = VOCAB};
  const heddle_head_inputs inputs = {.storage = HEDDLE_F32,
                                     .hidden = hidden,
                                     .weight = weight,
                                     .target_ids = target_ids,
                                     .active = active,
                                     .temperature = 0.7};
  const heddle_head_outputs outputs = {
      .logps = logps, .entropy = entropy, .max = max, .exp_sum = exp_sum};
  const heddle_head_cotangents cotangents = {
      .max = max, .exp_sum = exp_sum, .d_logps = d_logps, .d_hidden = d_hidden};
  check(context, heddle_head_forward(context, &dims, &inputs, &outputs));
  check(context, heddle_head_backward(context, &dims, &inputs, &cotangents));

  puts("token  log-prob  entropy  d loss / d hidden");
  for (int t = 0; t < TOKENS; ++t) {
    const float* d = d_hidden + t * HIDDEN;
    printf("%5d  %8.4f  %7.4f  %8.4f %8.4f %8.4f %8.4f\n", t, (double)logps[t], (double)entropy[t],
           (double)d[0], (double)d[1], (double)d[2], (double)d[3]);
  }
}

static void mix(heddle_context* context) {
  static float qkv[TOKENS * COLUMNS], conv_weight[COLUMNS * KERNEL];
  static float a[TOKENS * VALUE_HEADS], b[TOKENS * VALUE_HEADS];
  static float o[TOKENS * VALUE_HEADS * VALUE_DIM];
  const float A_log[VALUE_HEADS] = {0, 0.5F}, dt_bias[VALUE_HEADS] = {0.1F, -0.1F};
  const int32_t segment_ids[TOKENS] = {1, 1, 1, 2, 2, 2};
  fill(qkv, TOKENS * COLUMNS, 3);
  fill(conv_weight, COLUMNS * KERNEL, 4);
  fill(a, TOKENS * VALUE_HEADS, 5);
  fill(b, TOKENS * VALUE_HEADS, 6);

  const heddle_gdn_dims dims = {.tokens = TOKENS,
                                .key_heads = KEY_HEADS,
                                .value_heads = VALUE_HEADS,
                                .key_dim = KEY_DIM,
                                .value_dim = VALUE_DIM,
                                .kernel = KERNEL};
  const heddle_gdn_inputs inputs = {.storage = HEDDLE_F32,
                                    .qkv = qkv,
                                    .conv_weight = conv_weight,
                                    .a = a,
                                    .b = b,
                                    .A_log = A_log,
                                    .dt_bias = dt_bias,
                                    .segment_ids = segment_ids};
  const heddle_gdn_outputs outputs = {.o = o};
  check(context, heddle_gdn_forward(context, &dims, &inputs, &outputs));

  puts("\ntoken  document  o of head 0          o of head 1");
  for (int t = 0; t < TOKENS; ++t) {
    const float* row = o + t * VALUE_HEADS * VALUE_DIM;
    printf("%5d  %8d  %8.4f %8.4f    %8.4f %8.4f\n", t, (int)segment_ids[t], (double)row[0],
           (double)row[1], (double)row[2], (double)row[3]);
  }
}

int main(void) {
  heddle_context* context = heddle_create();
  if (context == NULL) {
    fputs("c-api: no memory\n", stderr);
    return 1;
  }
  score(context);
  mix(context);
  heddle_destroy(context);
  return 0;
}
