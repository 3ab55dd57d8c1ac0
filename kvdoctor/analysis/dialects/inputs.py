"""Names of a decoder's inputs and outputs besides the cache, common to all dialects.

Sources: transformers, onnxruntime-genai, sherpa-onnx, the conversion scripts of ONNX Runtime, and, for adapters, PEFT
and Olive (ExtractAdapters with make_inputs). The first rule that
fits name, rank and element type holds.
"""

import re

from kvdoctor.analysis.dialects.dialect import RoleRule

PAST_LENGTH = r"past_sequence_length|past_key_values_length|past_(seq_)?len(gth)?|history_len|start_pos|pos"

INPUTS = (
    RoleRule(r"(input\.)?(decoder_)?input_ids|tokens|targets|tgt", "token_ids", "BQ", "integer"),
    RoleRule(r"(decoder_)?inputs?_embeds|x", "embeddings", "BQD", "float"),
    RoleRule(r"per_layer_inputs", "embeddings", "BQ11", "float"),
    RoleRule(r"deepstack_(features|embeds|visual_embeds)_\d{1,3}", "embeddings", "BQD", "float"),
    RoleRule(r"(decoder_)?attention_mask", "attention_mask", "BT"),
    RoleRule(r"(decoder_)?attention_mask|attn_mask|causal_mask", "additive_mask", "B1QT"),
    RoleRule(r"attn_mask|attention_mask", "additive_mask", "BQT", "float"),
    RoleRule(r"position_ids|positions", "position_ids", "BQ"),
    RoleRule(r"position_ids", "position_ids", "1BQ"),
    RoleRule(r"position_ids|positions|cache_position", "cache_position", "Q"),
    RoleRule(r"position_ids_cos|rotary_cos|cos", "rotary_cos", "11QH", "float"),
    RoleRule(r"position_ids_sin|rotary_sin|sin", "rotary_sin", "11QH", "float"),
    RoleRule(r"write_indices", "write_index", "B", "integer"),
    RoleRule(r"offset|position|index|step", "write_index", "1", "integer"),
    RoleRule(r"offset|position|index|step", "write_index", "", "integer"),
    RoleRule(PAST_LENGTH, "past_length", "", "integer"),
    RoleRule(PAST_LENGTH, "past_length", "1", "integer"),
    RoleRule(r"past_sequence_lengths|past_seq_lens", "past_length", "B", "integer"),
    RoleRule(r"seqlens_k", "last_index", "B", "integer"),
    RoleRule(r"total_sequence_length|current_sequence_length", "total_length", "", "integer"),
    RoleRule(r"total_sequence_length|current_sequence_length", "total_length", "1", "integer"),
    RoleRule(r"nonpad_kv_seqlen|context_lengths", "total_length", "B", "integer"),
    RoleRule(r"ids_len", "new_length", "", "integer"),
    RoleRule(r"ids_len", "new_length", "1", "integer"),
    RoleRule(r"encoder_attention_mask|enc_mask|encoder_mask", "encoder_mask", "BE"),
    RoleRule(r"encoder_hidden_states|enc_states|hidden_states|encoder_states", "encoder_states", "BED", "float"),
    RoleRule(r"args_0", "token_ids", "BQ", "integer"),
    RoleRule(r"args_1", "encoder_states", "BED", "float"),
    RoleRule(r"args_2", "total_length", "1", "integer"),
    RoleRule(r"(.*[./_])?lora_?(A|B|a|b|down|up)([./_].*)?", "adapter", "11", "float"),
    RoleRule(r"use_cache_branch", "branch_switch", "1"),
    RoleRule(r"(num_)?logits_to_keep", "logits_to_keep", "", "integer"),
    RoleRule(r"(num_)?logits_to_keep", "logits_to_keep", "1", "integer"),
    RoleRule(r"sliding_window", "setting", "", "integer"),
    RoleRule(r"sliding_window", "setting", "1", "integer"),
    RoleRule(r"beam_width", "beam_input", "1", "integer"),
    RoleRule(r"cache_indirection", "beam_input", "B1M", "integer"),
    RoleRule(r"block_tables?(_windowed)?|kv_page_table", "block_table", "BK", "integer"),
    RoleRule(r"slot_mapping|attention_metadata", "block_table", "1", "integer"),
    RoleRule(r"cumulative_sequence_lengths", "total_length", "B", "integer"),
    RoleRule(r"logits_indices", "logits_to_keep", "1", "integer"),
)

OUTPUTS = (
    RoleRule(r"(output\.)?logits", "logits", "BQV"),
    RoleRule(r"logits", "logits", "BV"),
    RoleRule(r"logits", "logits", "BV11"),
    RoleRule(r"next_token", "next_token", "B"),
    RoleRule(r"next_token", "next_token", "B1"),
)

ENCODER_INPUTS = (
    RoleRule(r"(encoder_)?attention_mask|input_mask", "encoder_mask", "BI"),
    RoleRule(r"(encoder_)?input_ids", "encoder_input", "BI"),
    RoleRule(r"input_features|audio_features|mel", "encoder_input", "B1I"),
    RoleRule(r"input_values|audio", "encoder_input", "BI"),
    RoleRule(r"pixel_values", "encoder_input", "B111"),
    RoleRule(r"flattened_patches|x", "encoder_input", "BI1", "float"),
    RoleRule(r"args_0", "encoder_input", "BI1", "float"),
    RoleRule(r"args_1", "encoder_length", "1", "integer"),
    RoleRule(r"x_len|encoder_input_lengths?", "encoder_length", "B", "integer"),
)

DECODER_ONLY_NAMES = re.compile(r"decoder_(input_ids|inputs_embeds)")
SHARED_NAMES = re.compile(r"input_ids|attention_mask")
"""Parameters of forward() of an encoder-decoder (transformers): next to DECODER_ONLY_NAMES, these are the encoder's."""

ENCODER_OUTPUTS = (
    RoleRule(r"last_hidden_state|encoder_hidden_states|hidden_states|encoder_outputs?", "encoder_states", "BED"),
)
