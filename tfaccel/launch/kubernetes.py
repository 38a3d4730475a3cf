"""A job for Kubernetes: writes the manifest of a JobSet, with a pod for each worker.

    print(manifest(options, command))   # kubectl apply -f -

Nothing is submitted. The manifest was checked against the published schemas, but not run on a
cluster. No launcher runs in the pods. When a worker is lost, the others fail, and the JobSet then
restarts all of them. The JobSet does not notice a worker that hangs in its own Python code.
"""

import json
import re
from collections.abc import Sequence

from tfaccel.common.errors import UserError
from tfaccel.launch.options import Options, argv_of, warn_of_secrets, workdir_of
from tfaccel.runtime.cluster.addresses import FIRST_PORT

MANIFEST = """\
# Written by `tfaccel launch --engine=k8s --print`. It was checked against the schemas that
# Kubernetes and JobSet publish, but not run on a cluster. The cluster needs JobSet
# (jobset.sigs.k8s.io), and a ReadWriteMany volume claim of this name, which all workers share. You
# may have to change the number of GPUs of a pod, and the path of your data.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true # a pod is {name}-worker-0-INDEX.{name}
    publishNotReadyAddresses: true # workers wait for each other before any is ready
  failurePolicy:
    maxRestarts: {max_restarts} # of all pods, from the last checkpoint
    rules:
      - name: mistakeInTheCall
        action: FailJobSet
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: worker
      template:
        spec:
          completionMode: Indexed
          completions: {num_nodes}
          parallelism: {num_nodes}
          backoffLimit: 0 # a single worker cannot rejoin
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: worker
                  operator: In
                  values: [2]
          template:
            spec:
              restartPolicy: Never
              automountServiceAccountToken: false
              terminationGracePeriodSeconds: {grace_s:.0f} # to save after SIGTERM
              securityContext:
                runAsNonRoot: true
                runAsUser: 1000
                fsGroup: 1000
                seccompProfile:
                  type: RuntimeDefault
              containers:
                - name: worker
                  image: {image}
                  command: {command}
                  env:
                    - name: WORKER_INDEX
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['{index_annotation}']
                    - name: HOME # for caches; user 1000 has no home
                      value: /tmp
                    - name: TF_CONFIG # Kubernetes inserts the index
                      value: >-
                        {tf_config}
                  securityContext:
                    allowPrivilegeEscalation: false
                    capabilities:
                      drop: [ALL]
                  resources:
                    limits:
                      nvidia.com/gpu: 1
                  volumeMounts:
                    - name: shared
                      mountPath: {workdir}
              volumes:
                - name: shared
                  persistentVolumeClaim:
                    claimName: {name}
---
# TensorFlow's ports have no password: whoever reaches one can run code in the pod. This policy
# closes them to all but this job's pods, if the cluster's network supports such policies.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {name}
spec:
  podSelector:
    matchLabels:
      jobset.sigs.k8s.io/jobset-name: {name}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              jobset.sigs.k8s.io/jobset-name: {name}
"""

# A pod's name, NAME-worker-0-INDEX-xxxxx, may have at most 63 characters.
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
LONGEST_NAME = 40


def run(options: Options, command: Sequence[str]) -> int:
    """Prints the manifest and returns the exit code.

    Raises:
      UserError: a flag is missing, or cannot be written into a manifest.
    """
    if not options.prints:
        raise UserError(
            "--engine=k8s cannot submit a job; add --print, read the manifest, and run `kubectl "
            "apply -f FILE`"
        )
    warn_of_secrets(command)
    print(manifest(options, command), end="")
    return 0


def manifest(options: Options, command: Sequence[str]) -> str:
    """Returns the manifest as YAML; see `run`."""
    workdir = workdir_of(command)
    _check(options, workdir)
    # Each pod has its own address, so all workers can use the same port.
    addresses = [
        f"{options.name}-worker-0-{index}.{options.name}:{FIRST_PORT}"
        for index in range(options.num_nodes)
    ]
    # The quoted values are JSON, which is valid YAML. Kubernetes replaces the variable by a number.
    task = '{"type": "worker", "index": $(WORKER_INDEX)}'
    # Use the image's Python, and escape what Kubernetes would take for a variable.
    argv = ["python", *(each.replace("$(", "$$(") for each in argv_of(command)[1:])]
    return MANIFEST.format(
        name=options.name,
        max_restarts=options.max_restarts,
        num_nodes=options.num_nodes,
        index_annotation="batch.kubernetes.io/job-completion-index",
        grace_s=options.grace_s,
        image=json.dumps(options.image),
        command=json.dumps(argv),
        tf_config=f'{{"cluster": {{"worker": {json.dumps(addresses)}}}, "task": {task}}}',
        workdir=json.dumps(workdir),
    )


def _check(options: Options, workdir: str) -> None:
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", options.name) or (
        len(options.name) > LONGEST_NAME
    ):
        raise UserError(
            f"--name={options.name!r}; expected at most {LONGEST_NAME} small letters, digits and "
            "'-', as Kubernetes requires"
        )
    if options.name in YAML_WORDS:
        raise UserError(f"--name={options.name} is not text in YAML; give another name")
    if not options.image:
        raise UserError("--engine=k8s without --image; give a container image with tfaccel in it")
    if options.num_ranks_per_node > 1:
        raise UserError(
            f"--nproc-per-node={options.num_ranks_per_node} with --engine=k8s, where a pod is one "
            "process with all its GPUs; use more pods with --nnodes"
        )
    if not workdir.startswith("/") or workdir == "/":
        raise UserError(
            f"--workdir={workdir!r} with --engine=k8s; give the absolute path at which all pods "
            "mount the shared volume"
        )
