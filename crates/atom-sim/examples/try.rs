//! scratch
use atom_sim::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let lanes: usize = a[2].parse().unwrap();
    let requests: usize = a[3].parse().unwrap();
    let o = WorldOptions::new(WorldArgs { lanes, requests, faults: a.len() < 5, ..WorldArgs::default() })
        .unwrap();
    let t = std::time::Instant::now();
    let mut r = run_seeds(parse_seeds(&a[1]).unwrap(), &o);
    let n = r.failures.len();
    r.failures.truncate(8);
    println!("{r}\n{n} failures {:?}", t.elapsed());
}
