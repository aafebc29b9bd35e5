//! Row-wise copies and sums, and inputs for all row-wise kernels.

use crate::kit::Kit;
use atom_cuda::launch::rows::{self, RowExtent};
use atom_cuda::{CudaError, DeviceMem, Element};

/// Rows of a buffer: how many of each lane are real, and the capacity of a lane.
pub(crate) const EXTENTS: &[(&[u32], usize)] =
    &[(&[1], 4), (&[5], 5), (&[33], 40), (&[700], 703), (&[3, 0, 7], 8), (&[0], 4)];

/// Real rows among padding, on the GPU.
pub(crate) struct Rows {
    pub(crate) extent: RowExtent,
    /// Row numbers of the real ones.
    pub(crate) real: Vec<usize>,
    _counts: DeviceMem,
}

impl Rows {
    pub(crate) fn new(kit: &Kit, counts: &[u32], lane_rows: usize) -> Result<Self, CudaError> {
        let memory = kit.upload_words(counts)?;
        let extent = RowExtent { counts: memory.address(), lanes: counts.len(), lane_rows };
        let lanes = counts.iter().enumerate();
        let real = lanes.flat_map(|(lane, &n)| (0..n as usize).map(move |row| lane * lane_rows + row));
        Ok(Self { extent, real: real.collect(), _counts: memory })
    }

    /// Random values in real rows, NaN in the others; the values as kernels see them.
    pub(crate) fn fill(
        &self,
        kit: &mut Kit,
        width: usize,
        scale: f32,
        element: Element,
    ) -> Result<(Vec<f32>, DeviceMem), CudaError> {
        let mut values = vec![f32::NAN; self.extent.capacity() * width];
        for &row in &self.real {
            values[row * width..][..width].copy_from_slice(&kit.random(width, scale));
        }
        let values = element.rounded(&values);
        let memory = kit.upload(&values, element)?;
        Ok((values, memory))
    }

    /// Real rows must be near `expected` (one row behind the other), all others still poison.
    pub(crate) fn near(&self, kit: &mut Kit, name: &str, found: &[f32], expected: &[f64], bound: f64) {
        let width = found.len() / self.extent.capacity();
        let real: Vec<f32> =
            self.real.iter().flat_map(|row| found[row * width..][..width].to_vec()).collect();
        kit.near(name, &real, expected, bound);
        let others = (0..self.extent.capacity()).filter(|row| !self.real.contains(row));
        let others: Vec<f32> = others.flat_map(|row| found[row * width..][..width].to_vec()).collect();
        kit.untouched(&format!("{name}, padding"), &others, 0);
    }

    /// What `f` makes of every real row of `width`.
    pub(crate) fn each(&self, values: &[f32], width: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
        let row = |&row: &usize| -> Vec<f64> {
            f(&values[row * width..][..width].iter().map(|&x| f64::from(x)).collect::<Vec<_>>())
        };
        self.real.iter().flat_map(row).collect()
    }
}

/// Relative error that storing a result of this type may cost, with room for its rounding of inputs in between.
pub(crate) fn bound(element: Element) -> f64 {
    match element {
        Element::F32 => 2e-6,
        Element::BF16 => 4e-3,
    }
}

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    for element in [Element::F32, Element::BF16] {
        for width in [8, 20, 576, 4096] {
            for &(counts, capacity) in EXTENTS {
                let rows = Rows::new(kit, counts, capacity)?;
                let name = format!("{element:?}, width {width}, rows {counts:?}");
                embed(kit, element, width, &rows, &name)?;
                gated_silu(kit, element, width, &rows, &name)?;
                add_and_convert(kit, element, width, &rows, &name)?;
                pick_rows(kit, element, width, &rows, &name)?;
            }
        }
    }
    Ok(())
}

fn embed(kit: &mut Kit, element: Element, width: usize, rows: &Rows, name: &str) -> Result<(), CudaError> {
    let (vocab, slots) = (300, 9);
    let table = element.rounded(&kit.random(vocab * width, 1.0));
    let last: Vec<u32> = (0..slots).map(|_| kit.below(vocab) as u32).collect();
    let mut known = Vec::new();
    let tokens: Vec<u32> = (0..rows.extent.capacity())
        .map(|_| {
            let (slot, token, is_late) = (kit.below(slots), kit.below(vocab), kit.below(3) == 0);
            known.push(if is_late { last[slot] as usize } else { token });
            if is_late { slot as u32 | 1 << 31 } else { token as u32 }
        })
        .collect();
    let memory = (kit.upload(&table, element)?, kit.upload_words(&tokens)?, kit.upload_words(&last)?);
    let out = kit.poisoned(rows.extent.capacity() * width, Element::F32)?;
    let addresses = (memory.0.address(), memory.1.address(), memory.2.address());
    // SAFETY: arrays have the sizes that the launcher wants and live until they are read back, here and below.
    unsafe { rows::embed(&kit.queue(), element, addresses, width, out.address(), rows.extent) }?;
    let found = kit.download(&out, Element::F32)?;
    let row = |&row: &usize| table[known[row] * width..][..width].iter().map(|&x| f64::from(x));
    let expected: Vec<f64> = rows.real.iter().flat_map(row).collect();
    rows.near(kit, &format!("embed {name}"), &found, &expected, 0.0);
    Ok(())
}

fn gated_silu(
    kit: &mut Kit,
    element: Element,
    width: usize,
    rows: &Rows,
    name: &str,
) -> Result<(), CudaError> {
    let (mut values, _) = rows.fill(kit, 2 * width, 4.0, element)?;
    if let Some(row) = rows.real.first() {
        let extremes = [-1e4, -100.0, -88.0, -87.0, 88.0, 100.0, 0.0, -0.0];
        values[row * 2 * width..][..8].copy_from_slice(&element.rounded(&extremes));
    }
    let gate_up = kit.upload(&values, element)?;
    let out = kit.poisoned(rows.extent.capacity() * width, element)?;
    // SAFETY: as above.
    unsafe { rows::gated_silu(&kit.queue(), element, gate_up.address(), width, out.address(), rows.extent) }?;
    let found = kit.download(&out, element)?;
    let expected = rows.each(&values, 2 * width, |row| {
        let (gate, up) = row.split_at(width);
        gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    });
    rows.near(kit, &format!("gated silu {name}"), &found, &expected, bound(element));
    Ok(())
}

fn add_and_convert(
    kit: &mut Kit,
    element: Element,
    width: usize,
    rows: &Rows,
    name: &str,
) -> Result<(), CudaError> {
    let (x, x_memory) = rows.fill(kit, width, 1.0, element)?;
    let (y, out) = rows.fill(kit, width, 1.0, element)?;
    // SAFETY: as above.
    unsafe { rows::add(&kit.queue(), element, x_memory.address(), width, out.address(), rows.extent) }?;
    let found = kit.download(&out, element)?;
    let sums: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
    let expected = rows.each(&element.rounded(&sums), width, <[f64]>::to_vec);
    rows.near(kit, &format!("add {name}"), &found, &expected, 0.0);
    let other = if element == Element::F32 { Element::BF16 } else { Element::F32 };
    let out = kit.poisoned(rows.extent.capacity() * width, other)?;
    // SAFETY: as above.
    unsafe { rows::convert(&kit.queue(), element, x_memory.address(), width, out.address(), rows.extent) }?;
    let found = kit.download(&out, other)?;
    let expected = rows.each(&other.rounded(&x), width, <[f64]>::to_vec);
    rows.near(kit, &format!("convert {name}"), &found, &expected, 0.0);
    Ok(())
}

fn pick_rows(
    kit: &mut Kit,
    element: Element,
    width: usize,
    rows: &Rows,
    name: &str,
) -> Result<(), CudaError> {
    let source = element.rounded(&kit.random(50 * width, 1.0));
    let picked: Vec<u32> = (0..rows.extent.capacity()).map(|_| kit.below(50) as u32).collect();
    let (x, out_rows) = (kit.upload(&source, element)?, kit.upload_words(&picked)?);
    let out = kit.poisoned(rows.extent.capacity() * width, element)?;
    let (from, list) = (x.address(), out_rows.address());
    // SAFETY: as above.
    unsafe { rows::pick_rows(&kit.queue(), element, from, list, width, out.address(), rows.extent) }?;
    let found = kit.download(&out, element)?;
    let row = |&row: &usize| source[picked[row] as usize * width..][..width].iter().map(|&x| f64::from(x));
    let expected: Vec<f64> = rows.real.iter().flat_map(row).collect();
    rows.near(kit, &format!("pick rows {name}"), &found, &expected, 0.0);
    Ok(())
}
