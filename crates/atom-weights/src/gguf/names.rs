//! Names of tensors and types: ggml's on one side, the Hugging Face checkpoints' on the other.

use crate::config::Architecture;
use crate::tensor::DType;

/// Outside of the layers.
const GLOBAL: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];

/// Within `blk.N.` and `model.layers.N.`, before `.weight` or `.bias`. Those of experts are stacks, see
/// [`crate::experts`].
const LAYER: [(&str, &str); 19] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_exps", "mlp.experts.gate_proj"),
    ("ffn_up_exps", "mlp.experts.up_proj"),
    ("ffn_down_exps", "mlp.experts.down_proj"),
    ("ffn_gate_up_exps", "mlp.experts.gate_up_proj"),
    ("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    ("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// The one name without a leaf on the other side.
const SELECTION_BIAS: (&str, &str) = ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias");

/// Matrices of one expert, in files with a tensor for each.
const MATRICES: [(&str, &str); 3] =
    [("ffn_gate", "gate_proj"), ("ffn_up", "up_proj"), ("ffn_down", "down_proj")];

/// GLM-4-MoE's files call this norm otherwise. In other architectures the same name is another norm.
const GLM_NORM: (&str, &str) = ("post_attention_norm", "post_attention_layernorm");

/// ggml's numbers for tensor types. Those that can be read carry their [`DType`].
const TYPES: [(u32, &str, Option<DType>); 34] = [
    (0, "F32", Some(DType::F32)),
    (1, "F16", Some(DType::F16)),
    (2, "Q4_0", Some(DType::Q4_0)),
    (3, "Q4_1", Some(DType::Q4_1)),
    (6, "Q5_0", Some(DType::Q5_0)),
    (7, "Q5_1", Some(DType::Q5_1)),
    (8, "Q8_0", Some(DType::Q8_0)),
    (9, "Q8_1", None),
    (10, "Q2_K", None),
    (11, "Q3_K", None),
    (12, "Q4_K", Some(DType::Q4_K)),
    (13, "Q5_K", Some(DType::Q5_K)),
    (14, "Q6_K", Some(DType::Q6_K)),
    (15, "Q8_K", None),
    (16, "IQ2_XXS", None),
    (17, "IQ2_XS", None),
    (18, "IQ3_XXS", None),
    (19, "IQ1_S", None),
    (20, "IQ4_NL", None),
    (21, "IQ3_S", None),
    (22, "IQ2_S", None),
    (23, "IQ4_XS", None),
    (24, "I8", None),
    (25, "I16", None),
    (26, "I32", None),
    (27, "I64", None),
    (28, "F64", None),
    (29, "IQ1_M", None),
    (30, "BF16", Some(DType::BF16)),
    (34, "TQ1_0", None),
    (35, "TQ2_0", None),
    (39, "MXFP4", None),
    (40, "NVFP4", None),
    (41, "Q1_0", None),
];

/// `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`. `None` for names that no family
/// here has a use for.
pub(crate) fn hugging_face_name(gguf: &str, architecture: Architecture) -> Option<String> {
    if let Some((_, name)) = GLOBAL.iter().find(|(name, _)| *name == gguf) {
        return Some((*name).to_owned());
    }
    let (layer, rest) = gguf.strip_prefix("blk.")?.split_once('.')?;
    if !is_number(layer) {
        return None;
    }
    if rest == SELECTION_BIAS.0 {
        return Some(format!("model.layers.{layer}.{}", SELECTION_BIAS.1));
    }
    let (module, leaf) = split_leaf(rest)?;
    if let Some((_, name)) = layer_names(architecture).find(|(name, _)| *name == module) {
        return Some(format!("model.layers.{layer}.{name}.{leaf}"));
    }
    // The first files with experts had a tensor for each: ffn_up.7.
    let (matrix, expert) = module.split_once('.')?;
    let (_, name) = MATRICES.iter().find(|(name, _)| *name == matrix)?;
    is_number(expert).then(|| format!("model.layers.{layer}.mlp.experts.{expert}.{name}.{leaf}"))
}

/// The inverse of [`hugging_face_name`]; experts have names as stacks only.
pub(crate) fn gguf_name(hugging_face: &str, architecture: Architecture) -> Option<String> {
    if let Some((name, _)) = GLOBAL.iter().find(|(_, name)| *name == hugging_face) {
        return Some((*name).to_owned());
    }
    let (layer, rest) = hugging_face.strip_prefix("model.layers.")?.split_once('.')?;
    if !is_number(layer) {
        return None;
    }
    if rest == SELECTION_BIAS.1 {
        return Some(format!("blk.{layer}.{}", SELECTION_BIAS.0));
    }
    let (module, leaf) = split_leaf(rest)?;
    let (name, _) = layer_names(architecture).find(|(_, name)| *name == module)?;
    Some(format!("blk.{layer}.{name}.{leaf}"))
}

/// The table of an architecture; what is special to it comes first.
fn layer_names(architecture: Architecture) -> impl Iterator<Item = &'static (&'static str, &'static str)> {
    let glm = (architecture == Architecture::Glm4Moe).then_some(&GLM_NORM);
    glm.into_iter().chain(&LAYER)
}

/// The name of a tensor type and how to read it, if it can be read. `None` for an unknown number.
pub(crate) fn tensor_type(number: u32) -> Option<(&'static str, Option<DType>)> {
    TYPES.iter().find(|(known, _, _)| *known == number).map(|&(_, name, dtype)| (name, dtype))
}

/// ggml's number for a type.
pub(crate) fn type_number(dtype: DType) -> u32 {
    let found = TYPES.iter().find(|(_, _, known)| *known == Some(dtype));
    found.expect("every DType is in the table").0
}

fn split_leaf(name: &str) -> Option<(&str, &str)> {
    name.rsplit_once('.').filter(|(_, leaf)| matches!(*leaf, "weight" | "bias"))
}

/// Written as Rust writes numbers: "07" would be a second name of layer 7.
fn is_number(text: &str) -> bool {
    text.parse::<u32>().is_ok_and(|number| number.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_translate_both_ways() {
        let llama = Architecture::Llama;
        for (architecture, gguf, hugging_face) in [
            (llama, "token_embd.weight", "model.embed_tokens.weight"),
            (llama, "output_norm.weight", "model.norm.weight"),
            (llama, "output.weight", "lm_head.weight"),
            (llama, "blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
            (llama, "blk.7.attn_q.weight", "model.layers.7.self_attn.q_proj.weight"),
            (llama, "blk.7.attn_q.bias", "model.layers.7.self_attn.q_proj.bias"),
            (llama, "blk.12.attn_k_norm.weight", "model.layers.12.self_attn.k_norm.weight"),
            (llama, "blk.1.attn_output.weight", "model.layers.1.self_attn.o_proj.weight"),
            (llama, "blk.1.ffn_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
            (llama, "blk.1.ffn_down.bias", "model.layers.1.mlp.down_proj.bias"),
            (
                Architecture::Glm4Moe,
                "blk.1.post_attention_norm.weight",
                "model.layers.1.post_attention_layernorm.weight",
            ),
            (
                Architecture::Glm4Moe,
                "blk.1.exp_probs_b.bias",
                "model.layers.1.mlp.gate.e_score_correction_bias",
            ),
            (
                Architecture::Glm4Moe,
                "blk.1.ffn_down_shexp.weight",
                "model.layers.1.mlp.shared_experts.down_proj.weight",
            ),
            (Architecture::Mixtral, "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
            (Architecture::Mixtral, "blk.1.ffn_up_exps.weight", "model.layers.1.mlp.experts.up_proj.weight"),
        ] {
            assert_eq!(hugging_face_name(gguf, architecture).as_deref(), Some(hugging_face));
            assert_eq!(gguf_name(hugging_face, architecture).as_deref(), Some(gguf));
        }
        assert_eq!(
            hugging_face_name("blk.1.ffn_up.7.weight", Architecture::Mixtral).as_deref(),
            Some("model.layers.1.mlp.experts.7.up_proj.weight")
        );
    }

    #[test]
    fn unknown_names_and_second_spellings_of_a_layer_are_left_alone() {
        for name in [
            "rope_freqs.weight",
            "blk.x.attn_q.weight",
            "blk.07.attn_q.weight",
            "blk.+7.attn_q.weight",
            "blk.7.attn_q",
            "blk.7.attn_q.scale",
            "blk.7.post_attention_norm.weight",
            "blk.7.ffn_up.07.weight",
            "blk.7.attn_q.7.weight",
            "blk.7.nextn.eh_proj.weight",
            "blk.07.exp_probs_b.bias",
            "blk.99999999999.attn_q.weight",
            "",
        ] {
            assert_eq!(hugging_face_name(name, Architecture::Llama), None, "{name}");
        }
    }

    #[test]
    fn every_readable_type_has_one_number() {
        let readable: Vec<_> =
            TYPES.iter().filter_map(|&(number, _, dtype)| Some((number, dtype?))).collect();
        assert_eq!(readable.len(), 11);
        for (number, dtype) in readable {
            assert_eq!(type_number(dtype), number);
            assert_eq!(tensor_type(number), Some((&*format!("{dtype:?}"), Some(dtype))));
        }
        assert_eq!(tensor_type(4), None);
    }
}
