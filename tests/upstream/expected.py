"""Which of upstream's server tests are run here, and which of those cannot pass with another model than theirs. Checked by test_server.py.

An entry is FILE::TEST, which stands for all parameters of the test, or FILE::TEST[PARAMETERS].
"""

from __future__ import annotations

FILES = (
    "test_basic.py",
    "test_chat_completion.py",
    "test_compat_anthropic.py",
    "test_compat_gcp.py",
    "test_completion.py",
    "test_ctx_shift.py",
    "test_embedding.py",
    "test_ignore_eos.py",
    "test_kv_keep_only_active.py",
    "test_metrics.py",
    "test_security.py",
    "test_sleep.py",
    "test_slot_save.py",
    "test_speculative.py",
    "test_tokenize.py",
)

# Not run, by reason.
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "needs OpenAI's Python package, which is large; the same requests are made without it by the tests beside it": (
        "test_chat_completion.py::test_chat_completion_with_openai_library",
        "test_chat_completion.py::test_logprobs",
        "test_chat_completion.py::test_logprobs_stream",
        "test_chat_completion.py::test_logit_bias",
        "test_completion.py::test_completion_with_openai_library",
        "test_completion.py::test_completion_stream_with_openai_library",
        "test_embedding.py::test_embedding_openai_library_single",
        "test_embedding.py::test_embedding_openai_library_multiple",
        "test_security.py::test_openai_library_correct_api_key",
    ),
    "needs a model that sees, and pictures from the net": (
        "test_compat_anthropic.py::test_anthropic_vision_base64_with_multimodal_model",
        "test_security.py::test_local_media_file",
        "test_slot_save.py::test_slot_save_restore_text_only_on_multimodal",
        "test_slot_save.py::test_slot_save_restore_with_image",
        "test_slot_save.py::test_slot_save_restore_with_two_images",
        "test_slot_save.py::test_slot_save_restore_with_image_across_restart",
        "test_slot_save.py::test_slot_save_restore_image_payload_larger_than_context",
        "test_slot_save.py::test_slot_restore_media_file_without_mmproj",
    ),
    "looks at the web page, which test builds leave out": (
        "test_basic.py::test_no_ui",
        "test_security.py::test_access_static_assets_without_api_key",
    ),
}

# Run, and failing with stock llama-server as well, by reason.
FAILS: dict[str, tuple[str, ...]] = {
    "expects the words of a model of bedtime stories": (
        "test_basic.py::test_load_split_model",
        "test_slot_save.py::test_slot_save_restore",
        "test_slot_save.py::test_slot_erase",
        "test_speculative.py::test_multi_requests_parallel",
    ),
    "expects the begin-of-text token of the stories' vocabulary": (
        "test_chat_completion.py::test_chat_template",
        "test_completion.py::test_completion_response_fields[I believe the meaning of life is-32-response_fields1]",
        "test_tokenize.py::test_tokenize_with_bos",
    ),
    "expects the number of tokens that the stories' vocabulary makes of a text": (
        "test_chat_completion.py::test_chat_completion",
        "test_chat_completion.py::test_chat_completion_cached_tokens",
        "test_chat_completion.py::test_chat_completion_stream",
        "test_chat_completion.py::test_return_progress[64-4-False]",
        "test_completion.py::test_completion",
        "test_completion.py::test_completion_stream",
        "test_completion.py::test_completion_prompt_cache",
        "test_ctx_shift.py::test_ctx_shift_enabled",
        "test_ctx_shift.py::test_ctx_shift_disabled_short_prompt[-1-248-True]",
        "test_ctx_shift.py::test_ctx_shift_disabled_long_prompt",
        "test_embedding.py::test_embedding_pooling_none",
        "test_embedding.py::test_embedding_error_prompt_too_long",
        "test_embedding.py::test_embedding_usage_single[This is a test-6]",
        "test_slot_save.py::test_slot_restore_legacy_token_list",
        "test_speculative.py::test_slot_ctx_not_exceeded",
        "test_speculative.py::test_with_ctx_shift",
    ),
}
