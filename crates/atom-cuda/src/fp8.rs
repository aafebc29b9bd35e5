//! Weights that stay e4m3 codes in device memory: which do, and where their scales lie.
//!
//! A checkpoint's scales come in many forms; kernels know two. Scales of a whole matrix are those of all its outputs, so
//! matrices of different scales can stand one behind the other. Blocks of 128 x 128 stay blocks where no part that is
//! stacked cuts one. Everything else is expanded, and said so.

use crate::device::Properties;
use crate::element::Element;
use crate::order::SumOrder;
use atom_ops::Slice;
use atom_weights::DType;

/// Which weights of a matrix of codes share an f32 scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fp8Form {
    /// Those of an output: `[outputs]`.
    Channel,
    /// Those of a block of 128 x 128: `[blocks of outputs, stride]`, where the stride is the blocks of inputs rounded up to
    /// 4, as cuBLASLt wants it.
    Block,
}

/// How the numbers of a matrix lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    /// As elements of the shelf's type.
    Plain,
    /// As codes of one byte. `scales` is an offset in the block of weights.
    Fp8 { form: Fp8Form, scales: usize },
}

/// What is to become of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// It was never FP8.
    Plain,
    Keep(Fp8Form),
    /// It was, and is expanded for this reason.
    Expand(&'static str),
}

impl Fp8Form {
    /// f32 scales of a matrix.
    pub fn scales(self, outputs: usize, inputs: usize) -> usize {
        match self {
            Self::Channel => outputs,
            Self::Block => outputs.div_ceil(BLOCK) * Self::stride(inputs),
        }
    }

    /// Scales from one row of blocks to the next.
    pub fn stride(inputs: usize) -> usize {
        inputs.div_ceil(BLOCK).next_multiple_of(4)
    }

    /// Scales of a row of activations for such a matrix: one, or one for each 128 inputs.
    pub fn groups(self, inputs: usize) -> usize {
        match self {
            Self::Channel => 1,
            Self::Block => inputs.div_ceil(BLOCK),
        }
    }
}

/// Whether weights of FP8 checkpoints stay codes beside activations of this type on such a GPU; else the reason. cuBLASLt
/// knows scales of rows and blocks on compute capability 9.0 alone.
pub(crate) fn stays(element: Element, order: SumOrder, properties: &Properties) -> Result<(), &'static str> {
    match (element, order, properties.capability) {
        (Element::F32, ..) => Err("--dtype float32 computes in f32"),
        (Element::BF16, SumOrder::Fixed, _) => Err("--deterministic has no products in FP8 yet"),
        (Element::BF16, SumOrder::Fastest, (9, 0)) => Ok(()),
        (Element::BF16, SumOrder::Fastest, _) => Err("FP8 products need a GPU of compute capability 9.0"),
    }
}

/// What becomes of parts whose outputs stand one behind the other.
pub(crate) fn choose(parts: &[Slice], stays: Result<(), &'static str>) -> Choice {
    let codes = parts.iter().filter(|part| part.tensor.dtype == DType::F8_E4M3).count();
    if codes == 0 {
        return Choice::Plain;
    }
    if let Err(reason) = stays {
        return Choice::Expand(reason);
    }
    if codes < parts.len() {
        return Choice::Expand("only some of the matrices that are stacked are FP8");
    }
    let outputs: usize = parts.iter().map(|part| part.rows.len()).sum();
    let inputs = parts[0].cols.len();
    if !inputs.is_multiple_of(GRANULE) || !outputs.is_multiple_of(GRANULE) || inputs > INPUTS_MAX {
        return Choice::Expand("products in FP8 take inputs and outputs by 16, and at most 32768 inputs");
    }
    if parts.iter().all(is_by_output) {
        return Choice::Keep(Fp8Form::Channel);
    }
    // A part may end within a block only if nothing stands behind it.
    let is_whole = |(index, part): (usize, &Slice)| {
        begins_a_block(part) && (index + 1 == parts.len() || part.rows.len().is_multiple_of(BLOCK))
    };
    if parts.iter().enumerate().all(is_whole) {
        return Choice::Keep(Fp8Form::Block);
    }
    Choice::Expand(
        "a slice or a stacked matrix begins or ends within a block of scales, or blocks are not 128 x 128",
    )
}

/// What becomes of the experts of a layer: all alike, and by rules in which outputs and inputs are the same, so that one answer
/// holds for both products of a layer, whose outputs are the other's inputs.
pub(crate) fn choose_experts(experts: &[Vec<Slice>], stays: Result<(), &'static str>) -> Choice {
    let mut choices = experts.iter().map(|parts| choose(parts, stays));
    let Some(first) = choices.next() else { return Choice::Plain };
    if choices.any(|choice| choice != first) {
        return Choice::Expand("the experts of a layer are stored or scaled in different ways");
    }
    if !matches!(first, Choice::Keep(_)) {
        return first;
    }
    let parts = || experts.iter().flatten();
    let all_sides =
        |holds: fn(usize) -> bool| parts().flat_map(|part| [part.rows.len(), part.cols.len()]).all(holds);
    if parts().any(is_in_blocks) {
        if parts().all(begins_a_block) && all_sides(|side| side.is_multiple_of(BLOCK)) {
            return Choice::Keep(Fp8Form::Block);
        }
        // A single block is a scale of the matrix.
        if !parts().all(|part| is_by_output(part) && begins_a_block(part)) || !all_sides(|side| side <= BLOCK)
        {
            return Choice::Expand(
                "experts in FP8 with scales of blocks take blocks of 128 x 128, and a hidden size and a width that are \
                 multiples of 128",
            );
        }
    }
    if !all_sides(|side| side.is_multiple_of(GRANULE)) {
        return Choice::Expand("experts in FP8 take a hidden size and a width that are multiples of 16");
    }
    Choice::Keep(Fp8Form::Channel)
}

/// The scales of parts, as kernels have them.
pub(crate) fn scales(parts: &[Slice], form: Fp8Form) -> Vec<f32> {
    let mut values = Vec::new();
    for Slice { tensor, rows, cols } in parts {
        match form {
            Fp8Form::Channel => values.extend(rows.clone().map(|row| tensor.scale_at(row, cols.start).0)),
            Fp8Form::Block => {
                for row in rows.clone().step_by(BLOCK) {
                    let end = values.len() + Fp8Form::stride(cols.len());
                    values.extend(cols.clone().step_by(BLOCK).map(|col| tensor.scale_at(row, col).0));
                    values.resize(end, 0.0);
                }
            }
        }
    }
    values
}

/// Whether every row of a slice has one scale.
fn is_by_output(part: &Slice) -> bool {
    part.tensor.scale_block().is_some_and(|([_, wide], _)| wide >= part.tensor.cols())
}

/// Whether scales are neither one of the matrix nor those of its rows.
fn is_in_blocks(part: &Slice) -> bool {
    let whole = [part.tensor.rows(), part.tensor.cols()];
    part.tensor.scale_block().is_some_and(|(block, _)| block == [BLOCK; 2] || block[0] > 1 && block != whole)
}

fn begins_a_block(part: &Slice) -> bool {
    part.tensor.scale_block().is_some_and(|(block, first_row)| {
        block == [BLOCK; 2]
            && (first_row + part.rows.start).is_multiple_of(BLOCK)
            && part.cols.start.is_multiple_of(BLOCK)
    })
}

/// Sides of a block of weights, and inputs of a group of activations.
pub(crate) const BLOCK: usize = 128;
/// cuBLASLt's alignment of 16 bytes, along either side of the codes.
const GRANULE: usize = 16;
/// A row that 1024 threads quantise holds 32 elements of each.
pub(crate) const INPUTS_MAX: usize = 32 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use atom_weights::{Fp8Scales, Tensor};
    use std::sync::Arc;

    fn codes(rows: usize, cols: usize, form: Fp8Scales) -> Slice {
        let shape = match form {
            Fp8Scales::Tensor => vec![],
            Fp8Scales::Channel => vec![rows, 1],
            Fp8Scales::Block { rows: high, cols: wide } => vec![rows.div_ceil(high), cols.div_ceil(wide)],
        };
        let count = shape.iter().product();
        let values = Tensor::from_f32(shape, (1..=count).map(|i| i as f32).collect());
        let tensor =
            Tensor::new(DType::F8_E4M3, vec![rows, cols], Arc::new(vec![0x38; rows * cols]), 0, rows * cols);
        Slice { tensor: tensor.scaled(form, values), rows: 0..rows, cols: 0..cols }
    }

    const BLOCKS: Fp8Scales = Fp8Scales::Block { rows: 128, cols: 128 };

    #[test]
    fn scales_of_matrices_and_of_outputs_become_scales_of_outputs() {
        let parts = [codes(32, 64, Fp8Scales::Tensor), codes(16, 64, Fp8Scales::Channel)];
        assert_eq!(choose(&parts, Ok(())), Choice::Keep(Fp8Form::Channel));
        let expected: Vec<f32> = [1.0; 32].into_iter().chain((1..=16).map(|i| i as f32)).collect();
        assert_eq!(scales(&parts, Fp8Form::Channel), expected);
        let part = Slice { rows: 4..20, cols: 16..48, ..codes(32, 64, Fp8Scales::Channel) };
        assert_eq!(choose(std::slice::from_ref(&part), Ok(())), Choice::Keep(Fp8Form::Channel));
        assert_eq!(scales(&[part], Fp8Form::Channel), (5..=20).map(|i| i as f32).collect::<Vec<_>>());
    }

    #[test]
    fn blocks_stay_blocks_if_none_is_cut() {
        // The last part may end within a block, and so may rows.
        let parts = [codes(256, 320, BLOCKS), codes(144, 320, BLOCKS)];
        assert_eq!(choose(&parts, Ok(())), Choice::Keep(Fp8Form::Block));
        let expected = [1., 2., 3., 0., 4., 5., 6., 0., 1., 2., 3., 0., 4., 5., 6., 0.];
        assert_eq!(scales(&parts, Fp8Form::Block), expected);
        assert_eq!(Fp8Form::Block.scales(400, 320), expected.len());
        let part = Slice { rows: 128..256, cols: 128..320, ..codes(256, 320, BLOCKS) };
        assert_eq!(choose(std::slice::from_ref(&part), Ok(())), Choice::Keep(Fp8Form::Block));
        assert_eq!(scales(&[part], Fp8Form::Block), [5., 6., 0., 0.]);
    }

    #[test]
    fn experts_stay_codes_if_all_do_and_both_products_can() {
        let keeps = |experts: &[Vec<Slice>]| choose_experts(experts, Ok(()));
        let gate_up = |form, width, hidden| vec![codes(width, hidden, form), codes(width, hidden, form)];
        // Width and hidden size, and what becomes of both products.
        for (form, width, hidden, expected) in [
            (Fp8Scales::Tensor, 48, 80, Some(Fp8Form::Channel)),
            (Fp8Scales::Channel, 48, 80, Some(Fp8Form::Channel)),
            (Fp8Scales::Channel, 40, 64, None),
            (BLOCKS, 256, 384, Some(Fp8Form::Block)),
            (BLOCKS, 128, 384, Some(Fp8Form::Block)),
            (BLOCKS, 128, 128, Some(Fp8Form::Block)),
            (BLOCKS, 48, 128, Some(Fp8Form::Channel)),
            (BLOCKS, 48, 256, None),
            (BLOCKS, 128, 320, None),
            (BLOCKS, 160, 192, None),
            (Fp8Scales::Block { rows: 64, cols: 128 }, 256, 128, None),
        ] {
            for experts in [gate_up(form, width, hidden), vec![codes(hidden, width, form)]] {
                let found = keeps(&[experts.clone(), experts]);
                match expected {
                    Some(form) => assert_eq!(found, Choice::Keep(form), "{width} of {hidden}"),
                    None => assert!(matches!(found, Choice::Expand(_)), "{found:?} for {width} of {hidden}"),
                }
            }
        }
        let channel = gate_up(Fp8Scales::Channel, 128, 128);
        let mixed = [channel.clone(), gate_up(BLOCKS, 128, 256)];
        assert!(matches!(keeps(&mixed), Choice::Expand(_)));
        assert_eq!(choose_experts(&[channel], Err("why")), Choice::Expand("why"));
    }

    #[test]
    fn what_no_kernel_takes_is_expanded_with_a_reason() {
        let plain = Tensor::from_f32(vec![16, 64], vec![0.0; 16 * 64]);
        let plain = Slice { tensor: plain, rows: 0..16, cols: 0..64 };
        assert_eq!(choose(std::slice::from_ref(&plain), Ok(())), Choice::Plain);
        let wide = Fp8Scales::Block { rows: 64, cols: 128 };
        for parts in [
            vec![plain, codes(16, 64, Fp8Scales::Tensor)],
            vec![codes(16, 72, Fp8Scales::Tensor)],
            vec![codes(24, 64, Fp8Scales::Tensor)],
            vec![codes(16, INPUTS_MAX + 16, Fp8Scales::Tensor)],
            vec![codes(192, 256, BLOCKS), codes(64, 256, BLOCKS)],
            vec![codes(256, 256, wide)],
            vec![Slice { rows: 64..256, ..codes(256, 256, BLOCKS) }],
            vec![Slice { cols: 64..256, ..codes(256, 256, BLOCKS) }],
            vec![codes(256, 256, Fp8Scales::Tensor), codes(256, 256, BLOCKS)],
        ] {
            assert!(matches!(choose(&parts, Ok(())), Choice::Expand(_)), "{parts:?}");
        }
        let codes = [codes(16, 64, Fp8Scales::Tensor)];
        assert_eq!(choose(&codes, Err("why")), Choice::Expand("why"));
    }
}
