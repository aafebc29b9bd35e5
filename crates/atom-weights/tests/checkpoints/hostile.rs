//! Files cut anywhere and with bytes changed at random: an error or a model, never a panic.

use crate::common::{Folder, config_with, safetensors_file, synthetic};
use atom_weights::gguf::{Gguf, write, write::GgufWriter};
use atom_weights::{Checkpoint, DType, WeightsError, dequantize};
use proptest::prelude::*;
use serde_json::json;
use std::path::Path;
use std::sync::LazyLock;

/// Every kind of metadata and a model, some kilobytes long.
static SMALL_GGUF: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let changes = json!({"vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}});
    let model = synthetic(&config_with("qwen3", &changes));
    let mut writer: GgufWriter = write::from_checkpoint(&model, DType::Q4_1).unwrap();
    writer
        .strings("tokenizer.ggml.tokens", &["a", "b", "Ġc"])
        .i32s("tokenizer.ggml.token_type", &[1, 1, 3])
        .f32s("tokenizer.ggml.scores", &[0.0, -1.0])
        .bool("tokenizer.ggml.add_bos_token", true);
    writer.finish()
});

/// A model with stacks of experts, and where its header ends.
static EXPERTS_GGUF: LazyLock<(Vec<u8>, usize)> = LazyLock::new(|| {
    let changes = json!({"vocab_size": 8, "hidden_size": 32, "intermediate_size": 32, "head_dim": 16,
        "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 2, "topk_group": 2});
    let model = synthetic(&config_with("glm4_moe", &changes));
    let file = write::from_checkpoint(&model, DType::Q4_1).unwrap().finish();
    let name = b"output.weight";
    let at = file.windows(name.len()).position(|window| window == name).unwrap();
    let end = at + name.len() + 4 + 16 + 4 + 8;
    (file, end)
});

/// Where the header ends: after the line of the last tensor, which is this one. Changes aim before it,
/// for of the tensors' own bytes every value is legal.
static HEADER_BYTES: LazyLock<usize> = LazyLock::new(|| {
    let name = b"rope_freqs.weight";
    let at = SMALL_GGUF.windows(name.len()).position(|window| window == name).unwrap();
    at + name.len() + 4 + 8 + 4 + 8
});

/// Opens a model and reads all there is to read of it.
fn exercise(bytes: Vec<u8>) -> Result<(), WeightsError> {
    let gguf = Gguf::from_bytes(bytes, Path::new("x.gguf"))?;
    for key in gguf.keys() {
        let _ = (gguf.string(key), gguf.u32(key), gguf.bool(key), gguf.f32(key));
        let _ = (gguf.strings(key), gguf.i32s(key), gguf.f32s(key));
    }
    let model = Checkpoint::from_gguf(gguf)?;
    let _ = model.config().rope.inverse_frequencies();
    let _ = (model.description(), model.unused());
    for name in model.names() {
        if let Ok(tensor) = model.tensor(name) {
            dequantize(&tensor);
        }
    }
    Ok(())
}

fn exercise_folder(folder: &Folder, safetensors: &[u8]) -> Result<(), WeightsError> {
    folder.write("model.safetensors", safetensors);
    let model = Checkpoint::open(folder.path())?;
    for name in model.names() {
        if let Ok(tensor) = model.tensor(name) {
            dequantize(&tensor);
        }
    }
    Ok(())
}

#[test]
fn a_gguf_cut_at_any_byte_is_an_error() {
    let whole = SMALL_GGUF.clone();
    exercise(whole.clone()).unwrap();
    // The last tensor, eight divisors in f32, fills its 32 bytes: nothing at the end is padding.
    for len in 0..whole.len() {
        assert!(exercise(whole[..len].to_vec()).is_err(), "{len} of {} bytes were accepted", whole.len());
    }
}

#[test]
fn a_safetensors_file_cut_at_any_byte_is_an_error() {
    let config = config_with(
        "llama",
        &json!({"vocab_size": 4, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}),
    );
    let (folder, model) = (Folder::new("cut"), synthetic(&config));
    folder.write_json("config.json", &config);
    let whole = safetensors_file(&model, DType::F16, model.names());
    exercise_folder(&folder, &whole).unwrap();
    for len in 0..whole.len() {
        assert!(
            exercise_folder(&folder, &whole[..len]).is_err(),
            "{len} of {} bytes were accepted",
            whole.len()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_bytes_of_a_gguf_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let mut bytes = SMALL_GGUF.clone();
        for (index, byte) in &changes {
            let at = index.index(*HEADER_BYTES);
            bytes[at] = *byte;
        }
        let _ = exercise(bytes);
    }

    #[test]
    fn changed_bytes_of_stacks_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let (mut bytes, header) = EXPERTS_GGUF.clone();
        for (index, byte) in &changes {
            let at = index.index(header);
            bytes[at] = *byte;
        }
        let _ = exercise(bytes);
    }

    #[test]
    fn numbers_at_their_extremes_never_panic(
        index in any::<prop::sample::Index>(),
        number in prop::sample::select(vec![0, 1, u64::MAX, u64::MAX / 2, 1 << 32, 1 << 40, u64::MAX - 31]),
    ) {
        let mut bytes = SMALL_GGUF.clone();
        let at = index.index(*HEADER_BYTES - 8);
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        let _ = exercise(bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn changed_bytes_of_safetensors_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let config = config_with("llama", &json!({"vocab_size": 4, "hidden_size": 4, "intermediate_size": 4,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 4}));
        let (folder, model) = (Folder::new("changed"), synthetic(&config));
        folder.write_json("config.json", &config);
        let mut bytes = safetensors_file(&model, DType::F16, model.names());
        for (index, byte) in &changes {
            let at = index.index(bytes.len());
            bytes[at] = *byte;
        }
        let _ = exercise_folder(&folder, &bytes);
    }
}
