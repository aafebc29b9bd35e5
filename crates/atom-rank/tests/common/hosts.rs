//! Several hosts of one group in one process, which meet over loopback TCP.

use super::Setup;
use atom_rank::{Host, Link, LinkArgs};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

/// Hosts of one group, each with its link.
pub struct Hosts {
    pub hosts: Vec<Host>,
    pub links: Vec<Arc<Link>>,
}

/// A port that nobody uses.
pub fn free_port() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// Starts all hosts at once: each waits for the others. `start(node, setup)` makes one.
pub fn start_hosts(setup: &Setup, nodes: usize, start: impl Fn(usize, Setup) -> Host + Sync) -> Hosts {
    let master = free_port();
    let one = |node: usize| {
        let patience = Duration::from_secs(60);
        let args = LinkArgs { nodes, node, master: master.clone(), fingerprint: 1, patience };
        let link = Arc::new(Link::connect(&args).unwrap());
        (start(node, Setup { link: Some(Arc::clone(&link)), ..setup.clone() }), link)
    };
    let (hosts, links) = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..nodes).map(|node| scope.spawn(move || one(node))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).unzip()
    });
    Hosts { hosts, links }
}
