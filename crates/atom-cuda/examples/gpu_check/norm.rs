//! RMS norms.

use crate::kit::Kit;
use crate::rows::{EXTENTS, Rows, bound};
use atom_cuda::launch::norm::{self, HeadWidths, NormOf, NormWeight};
use atom_cuda::{CudaError, Element};

pub(crate) fn checks(kit: &mut Kit) -> Result<(), CudaError> {
    for element in [Element::F32, Element::BF16] {
        for width in [8, 12, 100, 576, 4096, 16384] {
            for &(counts, capacity) in EXTENTS {
                if width * capacity > 2 << 20 {
                    continue;
                }
                let rows = Rows::new(kit, counts, capacity)?;
                let name = format!("{element:?}, width {width}, rows {counts:?}");
                of_rows(kit, element, width, &rows, &name)?;
            }
        }
        for (q, k, v) in [(96, 16, 16), (6144, 1024, 1024), (30, 12, 12)] {
            for &(counts, capacity) in EXTENTS {
                let rows = Rows::new(kit, counts, capacity)?;
                let name = format!("{element:?}, q {q}, k {k}, rows {counts:?}");
                over_heads(kit, element, HeadWidths { q, k, row: q + k + v }, &rows, &name)?;
            }
        }
    }
    Ok(())
}

fn reference(x: &[f64], weight: &[f32], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, &w)| x / (mean + eps).sqrt() * f64::from(w)).collect()
}

fn of_rows(kit: &mut Kit, element: Element, width: usize, rows: &Rows, name: &str) -> Result<(), CudaError> {
    let eps = 1e-5;
    let weights = kit.random(width, 1.0);
    let weight = kit.upload(&weights, Element::F32)?;
    let norm = NormWeight { weight: weight.address(), width, eps };
    for (of, type_of_x) in [(NormOf::Residual, Element::F32), (NormOf::Activations, element)] {
        let (x, memory) = rows.fill(kit, width, 3.0, type_of_x)?;
        let out = kit.poisoned(rows.extent.capacity() * width, element)?;
        let from = (memory.address(), of);
        // SAFETY: arrays have the sizes that the launcher wants and live until they are read back, here and below.
        unsafe { norm::norm(&kit.queue(), element, from, norm, out.address(), rows.extent) }?;
        let found = kit.download(&out, element)?;
        let expected = rows.each(&x, width, |row| reference(row, &weights, f64::from(eps)));
        rows.near(kit, &format!("norm of {of:?} {name}"), &found, &expected, bound(element));
    }
    let (before, residual) = rows.fill(kit, width, 3.0, Element::F32)?;
    let (x, memory) = rows.fill(kit, width, 2.0, element)?;
    let out = kit.poisoned(rows.extent.capacity() * width, element)?;
    let streams = (residual.address(), memory.address());
    // SAFETY: as above.
    unsafe { norm::add_norm(&kit.queue(), element, streams, norm, out.address(), rows.extent) }?;
    let sums: Vec<f32> = before.iter().zip(&x).map(|(r, x)| r + x).collect();
    let found = kit.download(&residual, Element::F32)?;
    let expected = rows.each(&sums, width, <[f64]>::to_vec);
    rows.near(kit, &format!("residual {name}"), &found, &expected, 0.0);
    let found = kit.download(&out, element)?;
    let expected = rows.each(&sums, width, |row| reference(row, &weights, f64::from(eps)));
    rows.near(kit, &format!("add and norm {name}"), &found, &expected, bound(element));
    Ok(())
}

fn over_heads(
    kit: &mut Kit,
    element: Element,
    widths: HeadWidths,
    rows: &Rows,
    name: &str,
) -> Result<(), CudaError> {
    let HeadWidths { q, k, row: width } = widths;
    let (x, qkv) = rows.fill(kit, width, 1.0, element)?;
    let sums = kit.poisoned(rows.extent.capacity() * 2, Element::F32)?;
    // SAFETY: as above.
    unsafe { norm::square_sums(&kit.queue(), element, qkv.address(), widths, sums.address(), rows.extent) }?;
    let found = kit.download(&sums, Element::F32)?;
    let squares = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
    let expected = rows.each(&x, width, |row| vec![squares(&row[..q]), squares(&row[q..q + k])]);
    rows.near(kit, &format!("square sums {name}"), &found, &expected, 1e-6);
    // Sums are over more ranks than this one.
    let (elements, eps) = ((2 * q, 3 * k), 1e-5);
    let weights = (kit.random(q, 1.0), kit.random(k, 1.0));
    let memory = (kit.upload(&weights.0, Element::F32)?, kit.upload(&weights.1, Element::F32)?);
    let (buffers, weight) = ((qkv.address(), sums.address()), (memory.0.address(), memory.1.address(), eps));
    // SAFETY: as above.
    unsafe { norm::scale_heads(&kit.queue(), element, buffers, weight, widths, elements, rows.extent) }?;
    let found = kit.download(&qkv, element)?;
    let scale = |x: &[f64], weight: &[f32], elements: usize| -> Vec<f64> {
        let root = (squares(x) / elements as f64 + f64::from(eps)).sqrt();
        x.iter().zip(weight).map(|(x, &w)| x / root * f64::from(w)).collect()
    };
    let expected = rows.each(&x, width, |row| {
        let mut out = scale(&row[..q], &weights.0, elements.0);
        out.extend(scale(&row[q..q + k], &weights.1, elements.1));
        out.extend(&row[q + k..]);
        out
    });
    rows.near(kit, &format!("scale heads {name}"), &found, &expected, bound(element));
    Ok(())
}
