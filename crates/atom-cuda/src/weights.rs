//! Weights: where each lies in one block of device memory, and how it gets there.

use crate::device::{Device, Event, Stream};
use crate::element::Element;
use crate::error::CudaError;
use crate::fp8::{self, Choice, Fp8Form, Stored};
use crate::kernels::{Kernels, Queue};
use crate::memory::{Address, DeviceMem, Pinned};
use crate::module::{Arg, Launch};
use atom_ops::{OpsError, Slice, Weight};
use atom_weights::{DType, Recipe, Tensor, quant};
use std::collections::{BTreeMap, HashMap};

/// What a weight is, and its offset in the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loaded {
    Matrix {
        outputs: usize,
        inputs: usize,
        at: usize,
        stored: Stored,
    },
    /// Expert after expert; scales alike, each expert's as those of a matrix.
    Experts {
        held: usize,
        outputs: usize,
        inputs: usize,
        at: usize,
        stored: Stored,
    },
    Vector {
        len: usize,
        at: usize,
    },
    Table {
        rows: usize,
        cols: usize,
        at: usize,
    },
}

/// The places of all weights. The same calls give the same places: once to plan, once to load.
pub(crate) struct Shelf {
    element: Element,
    /// Whether codes of FP8 stay codes, or why not.
    fp8: Result<(), &'static str>,
    loaded: Vec<Loaded>,
    used: usize,
    /// Why FP8 matrices were expanded, and how many for each reason.
    expanded: BTreeMap<&'static str, usize>,
    /// Whole matrices that are there already: a tied head is the embedding.
    whole: HashMap<(usize, usize), usize>,
    /// Keeps what `whole` knows alive, so that no other tensor gets its identity.
    kept: Vec<Tensor>,
}

/// Numbers that are still to be brought to `at`.
pub(crate) struct Delivery {
    /// Of each matrix; one, but for experts.
    pub(crate) matrices: Vec<Vec<Slice>>,
    pub(crate) at: usize,
    pub(crate) encoding: Encoding,
}

/// What numbers become on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Encoding {
    Element(Element),
    /// Codes as they are; scales of all matrices, one behind the other, go to an offset of their own.
    Fp8 {
        form: Fp8Form,
        scales: usize,
    },
}

impl Shelf {
    /// `fp8` as [`fp8::stays`] says.
    pub(crate) fn new(element: Element, fp8: Result<(), &'static str>) -> Self {
        let (loaded, whole, kept) = (Vec::new(), HashMap::new(), Vec::new());
        Self { element, fp8, loaded, used: 0, expanded: BTreeMap::new(), whole, kept }
    }

    /// Type of matrices that are not FP8.
    pub(crate) fn element(&self) -> Element {
        self.element
    }

    /// Bytes taken so far.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Why FP8 matrices were expanded, and how many for each reason.
    pub(crate) fn expanded(&self) -> &BTreeMap<&'static str, usize> {
        &self.expanded
    }

    pub(crate) fn loaded(&self, weight: Weight) -> Result<Loaded, OpsError> {
        let found = self.loaded.get(weight.0 as usize).copied();
        found.ok_or_else(|| OpsError::Weights(format!("{weight:?} was never loaded")))
    }

    /// How a matrix of FP8 codes, or a layer's experts of such, is scaled; `None` for all else.
    pub(crate) fn codes(&self, weight: Weight) -> Option<Fp8Form> {
        match self.loaded.get(weight.0 as usize) {
            Some(
                Loaded::Matrix { stored: Stored::Fp8 { form, .. }, .. }
                | Loaded::Experts { stored: Stored::Fp8 { form, .. }, .. },
            ) => Some(*form),
            _ => None,
        }
    }

    pub(crate) fn matrix(&mut self, parts: &[Slice]) -> Result<(Weight, Option<Delivery>), OpsError> {
        let (outputs, inputs) = stacked(parts)?;
        let choice = fp8::choose(parts, self.fp8);
        let (at, stored, delivery) = self.place_as(choice, vec![parts.to_vec()], outputs, inputs);
        Ok((self.keep(Loaded::Matrix { outputs, inputs, at, stored }), delivery))
    }

    pub(crate) fn experts(&mut self, experts: &[Vec<Slice>]) -> Result<(Weight, Option<Delivery>), OpsError> {
        let first = experts.first().ok_or_else(|| OpsError::Weights("a layer without experts".into()))?;
        let (outputs, inputs) = stacked(first)?;
        for parts in experts {
            if stacked(parts)? != (outputs, inputs) {
                return Err(OpsError::Weights("the experts of a layer differ in shape".into()));
            }
        }
        let choice = fp8::choose_experts(experts, self.fp8);
        let held = experts.len();
        let (at, stored, delivery) = self.place_as(choice, experts.to_vec(), outputs, inputs);
        Ok((self.keep(Loaded::Experts { held, outputs, inputs, at, stored }), delivery))
    }

    pub(crate) fn vector(&mut self, parts: &[Slice]) -> Result<(Weight, Option<Delivery>), OpsError> {
        if parts.iter().any(|part| part.rows.len() != 1) {
            return Err(OpsError::Weights("a vector of several rows".into()));
        }
        let len = parts.iter().map(|part| part.cols.len()).sum();
        let (at, delivery) = self.place(vec![parts.to_vec()], len, Element::F32);
        Ok((self.keep(Loaded::Vector { len, at }), delivery))
    }

    pub(crate) fn table(&mut self, table: &Tensor) -> Result<(Weight, Option<Delivery>), OpsError> {
        let (rows, cols) = (table.rows(), table.cols());
        let slice = Slice { tensor: table.clone(), rows: 0..rows, cols: 0..cols };
        let (at, delivery) = self.place(vec![vec![slice]], rows * cols, self.element);
        Ok((self.keep(Loaded::Table { rows, cols, at }), delivery))
    }

    /// Matrices of one shape, as codes with scales behind them or as elements.
    fn place_as(
        &mut self,
        choice: Choice,
        matrices: Vec<Vec<Slice>>,
        outputs: usize,
        inputs: usize,
    ) -> (usize, Stored, Option<Delivery>) {
        let (count, each) = (matrices.len(), outputs * inputs);
        if let Choice::Expand(reason) = choice {
            *self.expanded.entry(reason).or_default() += count;
        }
        let Choice::Keep(form) = choice else {
            let (at, delivery) = self.place(matrices, count * each, self.element);
            return (at, Stored::Plain, delivery);
        };
        let at = self.used;
        let scales = (at + count * each).next_multiple_of(ALIGN);
        self.used = (scales + 4 * count * form.scales(outputs, inputs)).next_multiple_of(ALIGN);
        let delivery = Delivery { matrices, at, encoding: Encoding::Fp8 { form, scales } };
        (at, Stored::Fp8 { form, scales }, Some(delivery))
    }

    fn place(
        &mut self,
        matrices: Vec<Vec<Slice>>,
        count: usize,
        element: Element,
    ) -> (usize, Option<Delivery>) {
        let whole = match &matrices[..] {
            [parts] => match &parts[..] {
                [Slice { tensor, rows, cols }]
                    if element == self.element
                        && *rows == (0..tensor.rows())
                        && *cols == (0..tensor.cols()) =>
                {
                    Some(tensor)
                }
                _ => None,
            },
            _ => None,
        };
        if let Some(&at) = whole.and_then(|tensor| self.whole.get(&tensor.identity())) {
            return (at, None);
        }
        let at = self.used;
        self.used = (at + count * element.bytes()).next_multiple_of(ALIGN);
        if let Some(tensor) = whole {
            self.whole.insert(tensor.identity(), at);
            self.kept.push(tensor.clone());
        }
        (at, Some(Delivery { matrices, at, encoding: Encoding::Element(element) }))
    }

    /// Nothing is loaded any more: tensors may go.
    pub(crate) fn close(&mut self) {
        self.whole.clear();
        self.kept.clear();
    }

    fn keep(&mut self, loaded: Loaded) -> Weight {
        self.loaded.push(loaded);
        Weight(u32::try_from(self.loaded.len() - 1).expect("a model has thousands of weights"))
    }
}

/// Outputs and inputs of slices whose outputs stand one behind the other.
fn stacked(parts: &[Slice]) -> Result<(usize, usize), OpsError> {
    let inputs = parts.first().map_or(0, |part| part.cols.len());
    if inputs == 0 || parts.iter().any(|part| part.cols.len() != inputs) {
        return Err(OpsError::Weights("parts of a matrix differ in inputs".into()));
    }
    Ok((parts.iter().map(|part| part.rows.len()).sum(), inputs))
}

/// Brings weights to the GPU through two pinned buffers: while one travels, threads fill the other.
pub(crate) struct Carrier {
    stream: Stream,
    buffers: [(Pinned, Event); 2],
    turn: usize,
}

impl Carrier {
    pub(crate) fn new(device: &Device) -> Result<Self, CudaError> {
        let stream = device.stream()?;
        let buffer = || -> Result<_, CudaError> {
            let (pinned, event) = (Pinned::new(device, BUFFER_BYTES)?, device.event()?);
            stream.mark(&event)?;
            Ok((pinned, event))
        };
        Ok(Self { buffers: [buffer()?, buffer()?], stream, turn: 0 })
    }

    pub(crate) fn deliver(
        &mut self,
        kernels: &Kernels,
        block: &DeviceMem,
        delivery: &Delivery,
    ) -> Result<(), CudaError> {
        let (mut at, encoding) = (delivery.at, delivery.encoding);
        for slice in delivery.matrices.iter().flatten() {
            let bytes = slice.rows.len() * slice.cols.len() * encoding.bytes();
            fits(block, at + bytes)?;
            if let Some(recipe) = slice.tensor.recipe() {
                self.make(kernels, slice, recipe, encoding, block.address().plus(at))?;
            } else {
                self.carry(slice, encoding, block, at)?;
            }
            at += bytes;
        }
        let Encoding::Fp8 { form, scales } = encoding else { return Ok(()) };
        let values: Vec<f32> = delivery.matrices.iter().flat_map(|parts| fp8::scales(parts, form)).collect();
        let bytes = Element::F32.encode(&values);
        fits(block, scales + bytes.len())?;
        for (index, bytes) in bytes.chunks(BUFFER_BYTES).enumerate() {
            let at = scales + index * BUFFER_BYTES;
            self.send(block, at, bytes.len(), |pinned| pinned.copy_from_slice(bytes))?;
        }
        Ok(())
    }

    /// Waits until all is there.
    pub(crate) fn finish(&self) -> Result<(), CudaError> {
        self.stream.wait()
    }

    fn make(
        &self,
        kernels: &Kernels,
        slice: &Slice,
        recipe: Recipe,
        encoding: Encoding,
        out: Address,
    ) -> Result<(), CudaError> {
        let stride = slice.tensor.cols() as u64;
        let first = recipe.first + slice.rows.start as u64 * stride + slice.cols.start as u64;
        // The scale of a made-up tensor's codes is the same for all of them.
        let of_codes = slice.tensor.scales().map_or(0.0, |_| slice.tensor.scale_at(0, 0).0);
        let args: [Arg<'_>; 10] = [
            out.into(),
            (slice.rows.len() as u64).into(),
            (slice.cols.len() as u64).into(),
            first.into(),
            stride.into(),
            recipe.key[0].into(),
            recipe.key[1].into(),
            Arg::Long(recipe.offset.to_bits()),
            Arg::Long(recipe.scale.to_bits()),
            of_codes.into(),
        ];
        let queue = Queue { kernels, stream: &self.stream };
        let elements = slice.rows.len() * slice.cols.len();
        let blocks = elements.div_ceil(256).min(64 * queue.processors() as usize) as u32;
        // SAFETY: `out` has room for the slice (checked by `deliver`) and lives as long as the backend.
        unsafe {
            let name = match encoding {
                Encoding::Element(Element::F32) => "synthetic_f32",
                Encoding::Element(Element::BF16) => "synthetic_bf16",
                Encoding::Fp8 { .. } => "synthetic_e4m3",
            };
            queue.launch("weights", name, Launch::new(blocks, 256), &args)
        }
    }

    fn carry(
        &mut self,
        slice: &Slice,
        encoding: Encoding,
        block: &DeviceMem,
        mut at: usize,
    ) -> Result<(), CudaError> {
        let row_bytes = slice.cols.len() * encoding.bytes();
        // A vector of a hundred million elements does not exist; a row always fits.
        let rows_max = (BUFFER_BYTES / row_bytes).max(1);
        let mut row = slice.rows.start;
        while row < slice.rows.end {
            let rows = row..slice.rows.end.min(row + rows_max);
            let bytes = rows.len() * row_bytes;
            self.send(block, at, bytes, |pinned| fill(slice, rows.clone(), encoding, pinned))?;
            (row, at) = (rows.end, at + bytes);
        }
        Ok(())
    }

    /// Fills one of the two buffers, and lets it travel.
    fn send(
        &mut self,
        block: &DeviceMem,
        at: usize,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), CudaError> {
        let (pinned, event) = &mut self.buffers[self.turn];
        event.wait()?;
        fill(&mut pinned[..bytes]);
        // SAFETY: the buffer is not touched before its event has passed.
        unsafe { block.upload(&self.stream, at, &pinned[..bytes]) }?;
        self.stream.mark(event)?;
        self.turn = 1 - self.turn;
        Ok(())
    }
}

impl Encoding {
    /// Bytes of one number.
    fn bytes(self) -> usize {
        match self {
            Self::Element(element) => element.bytes(),
            Self::Fp8 { .. } => 1,
        }
    }
}

fn fits(block: &DeviceMem, end: usize) -> Result<(), CudaError> {
    if end > block.bytes() {
        return Err(CudaError::Memory(format!(
            "weights need more than the {} bytes that were planned for them",
            block.bytes()
        )));
    }
    Ok(())
}

/// Rows of a slice in another type, by several threads where it pays.
fn fill(slice: &Slice, rows: std::ops::Range<usize>, encoding: Encoding, out: &mut [u8]) {
    let row_bytes = slice.cols.len() * encoding.bytes();
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
    let each = if out.len() < ALONE_BYTES { rows.len() } else { rows.len().div_ceil(threads) };
    std::thread::scope(|scope| {
        for (index, out) in out.chunks_mut(each.max(1) * row_bytes).enumerate() {
            let first = rows.start + index * each;
            let mut work = move || {
                for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
                    fill_row(slice, first + row, encoding, out);
                }
            };
            if each == rows.len() {
                work();
            } else {
                scope.spawn(work);
            }
        }
    });
}

fn fill_row(slice: &Slice, row: usize, encoding: Encoding, out: &mut [u8]) {
    let (dtype, cols) = (slice.tensor.dtype, &slice.cols);
    match (dtype, encoding) {
        (DType::BF16, Encoding::Element(Element::BF16))
        | (DType::F32, Encoding::Element(Element::F32))
        | (DType::F8_E4M3, Encoding::Fp8 { .. }) => {
            out.copy_from_slice(
                &slice.tensor.row(row)[dtype.row_bytes(cols.start)..dtype.row_bytes(cols.end)],
            );
        }
        (_, Encoding::Element(element)) => {
            let mut values = vec![0.0; cols.len()];
            quant::expand_row(&slice.tensor, row, cols.clone(), &mut values);
            out.copy_from_slice(&element.encode(&values));
        }
        (_, Encoding::Fp8 { .. }) => unreachable!("only codes of FP8 stay codes"),
    }
}

/// The copy engine wants tiles of weights on 128 bytes.
const ALIGN: usize = 256;
/// Half of what travels while the other half is filled.
const BUFFER_BYTES: usize = 64 << 20;
/// Below this one thread is done before others are awake.
const ALONE_BYTES: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use atom_weights::Fp8Scales;
    use half::bf16;
    use std::sync::Arc;

    /// A slice that begins and ends within blocks of scales, in both types, by one thread and by several.
    #[test]
    fn fp8_is_expanded_with_the_scales_of_its_blocks() {
        let (rows, cols, side) = (1000, 520, 128);
        // 0x38 is 1, 0xc0 is -2, 0x01 the smallest above 0.
        let codes: Vec<u8> = (0..rows * cols).map(|i| [0x38, 0xc0, 0x01][i % 3]).collect();
        let scales: Vec<f32> = (0..8 * 5).map(|i| 0.3 + i as f32).collect();
        let form = Fp8Scales::Block { rows: side, cols: side };
        let tensor = Tensor::new(DType::F8_E4M3, vec![rows, cols], Arc::new(codes), 0, rows * cols)
            .scaled(form, Tensor::from_f32(vec![8, 5], scales.clone()));
        let slice = Slice { tensor, rows: 60..960, cols: 100..410 };
        for element in [Element::F32, Element::BF16] {
            for taken in [60..70, 60..960] {
                let mut out = vec![0xff; taken.len() * slice.cols.len() * element.bytes()];
                fill(&slice, taken.clone(), Encoding::Element(element), &mut out);
                let expected =
                    taken.flat_map(|row| slice.cols.clone().map(move |col| (row, col))).map(|(row, col)| {
                        let value = [1.0, -2.0, 0.001_953_125][(row * cols + col) % 3];
                        let number = value * scales[row / side * 5 + col / side];
                        if element == Element::BF16 { bf16::from_f32(number).to_f32() } else { number }
                    });
                assert!(element.decode(&out).into_iter().eq(expected), "{element:?}");
            }
        }
    }
}
