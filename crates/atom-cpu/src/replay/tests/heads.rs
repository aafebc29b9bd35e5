//! Norms over all heads, sums, and the operator around routers.

use super::*;
use crate::replay::tests::meeting::Meeting;
use atom_ops::RouteSpec;

const ROWS: usize = 5;

#[test]
fn norms_over_all_heads_match_f64_and_have_the_bits_of_one_norm_on_every_set() {
    let spec = attention();
    let (q_width, k_width) = (spec.q_heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let heads = noise(1, ROWS, q_width + 2 * k_width);
    let (q_weight, k_weight) = (&noise(2, 1, q_width)[0], &noise(3, 1, k_width)[0]);
    let shape = StepShape { rows: ROWS + 1, out_rows: 1, lanes: 1 };
    for isa in supported() {
        for threads in [1, 3] {
            let mut backend = CpuBackend::new(options(threads, isa, Activations::Int8)).unwrap();
            let vector = |x: &[f32]| whole(&Tensor::from_f32(vec![x.len()], x.to_vec()));
            let weights = (
                backend.load_vector(&[vector(q_weight)]).unwrap(),
                backend.load_vector(&[vector(k_weight)]).unwrap(),
            );
            let all = table(&mut backend, &heads);
            let q = table(&mut backend, &heads.iter().map(|x| x[..q_width].to_vec()).collect::<Vec<_>>());
            backend.reserve(&reserve(shape)).unwrap();
            let mut ops = Ops::new(shape);
            let (qkv, sums) = (ops.buffer(Extent::Rows, q_width + 2 * k_width), ops.buffer(Extent::Rows, 2));
            let (alone, normed) = (ops.buffer(Extent::Rows, q_width), ops.buffer(Extent::Rows, q_width));
            ops.embed(all, qkv);
            ops.square_sums(qkv, &spec, sums);
            // Keys as one of two ranks has them: the other one's are twice as many.
            ops.scale_heads(qkv, &spec, sums, weights, (q_width, 3 * k_width), 1e-5);
            ops.embed(q, alone);
            ops.norm(alone, weights.0, 1e-5, normed);
            ops.add(alone, normed);
            let recorded = record(&mut backend, ops);
            let tokens: Vec<u32> = (0..ROWS as u32).collect();
            step(&mut backend, &recorded, &tokens, (&[ROWS as u32], 0), &Meeting::alone()).unwrap();
            let got = read(&mut backend, &recorded, qkv);
            let (sums, added) = (read(&mut backend, &recorded, sums), read(&mut backend, &recorded, normed));
            assert!(is_untouched(&got[ROWS]) && is_untouched(&sums[ROWS]), "padding was written");
            for (row, x) in heads.iter().enumerate() {
                let square = |x: &[f32]| x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
                let (q, k) = (&x[..q_width], &x[q_width..q_width + k_width]);
                let close = |got: f32, want: f64| {
                    assert!((f64::from(got) - want).abs() <= 1e-6 * want.abs().max(1.0), "{got}, not {want}");
                };
                close(sums[row][0], square(q));
                close(sums[row][1], square(k));
                let (q_scale, k_scale) = (
                    1.0 / (square(q) / q_width as f64 + 1e-5).sqrt(),
                    1.0 / (square(k) / (3 * k_width) as f64 + 1e-5).sqrt(),
                );
                for i in 0..q_width {
                    close(got[row][i], f64::from(q[i]) * q_scale * f64::from(q_weight[i]));
                    // The same bits as the norm, on which `add` put what it normed.
                    assert_eq!(added[row][i].to_bits(), (got[row][i] + q[i]).to_bits(), "{isa}");
                }
                for i in 0..k_width {
                    close(got[row][q_width + i], f64::from(k[i]) * k_scale * f64::from(k_weight[i]));
                }
                assert_eq!(got[row][q_width + k_width..], x[q_width + k_width..], "values stay");
            }
        }
    }
}

#[test]
fn rows_that_were_granted_but_do_not_run_choose_nobody() {
    let shape = StepShape { rows: 7, out_rows: 1, lanes: 1 };
    let spec = RouteSpec {
        experts: 8,
        top_k: 2,
        is_sigmoid: false,
        groups: 1,
        groups_kept: 1,
        normalise: true,
        scale: 1.0,
    };
    for threads in [1, 3] {
        let mut backend = CpuBackend::new(options(threads, Isa::detect(), Activations::Int8)).unwrap();
        let logits = table(&mut backend, &noise(4, ROWS, 8));
        backend.reserve(&reserve(shape)).unwrap();
        let mut ops = Ops::new(shape);
        let (rows, routes) = (ops.buffer(Extent::Rows, 8), ops.buffer(Extent::Rows, 4));
        ops.embed(logits, rows);
        ops.route(rows, None, &Arc::new(spec.clone()), routes);
        ops.route(rows, None, &Arc::new(spec.clone()), routes);
        let recorded = record(&mut backend, ops);
        for rows in [0, 1, ROWS] {
            let tokens: Vec<u32> = (0..rows as u32).collect();
            step(&mut backend, &recorded, &tokens, (&[6], 0), &Meeting::alone()).unwrap();
            let routes = read(&mut backend, &recorded, routes);
            for route in &routes[..rows] {
                assert!(route[0] >= 0.0 && route[0] < route[1] && route[1] < 8.0, "{route:?}");
                assert!((route[2] + route[3] - 1.0).abs() < 1e-6, "{route:?}");
            }
            assert!(routes[rows..6].iter().all(|route| *route == [NO_EXPERT, NO_EXPERT, 0.0, 0.0]));
            assert!(is_untouched(&routes[6]), "padding was written");
            assert_eq!(backend.expert_rows().chosen, 2 * 2 * rows as u64, "two routers");
        }
    }
}
