"""Checks a manifest of `tfaccel launch --engine=k8s` against the published schemas.

    tfaccel launch --engine=k8s --print --nnodes=2 --image=IMAGE train ... > job.yaml
    pip install kubernetes-validate
    python tools/check_manifest.py job.yaml --jobset=jobset.x-k8s.io_jobsets.yaml

The JobSet is checked against its resource definition (config/components/crd/bases/ of
kubernetes-sigs/jobset), and unknown fields are refused. The Job in it, its pods and the
NetworkPolicy are checked against the five newest versions of Kubernetes that kubernetes-validate
has. The program does not check what an API server checks beyond the schemas.
"""

import argparse
import importlib.metadata
import json
import pathlib

import jsonschema
import kubernetes_validate
import yaml


def main() -> None:
    """Checks the manifest, and prints JSON as the last line; raises an error for a wrong field."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("manifest", type=pathlib.Path)
    parser.add_argument(
        "--jobset", type=pathlib.Path, required=True, help="JobSet's resource definition"
    )
    arguments = parser.parse_args()
    jobset, policy = yaml.safe_load_all(arguments.manifest.read_text())
    definition = yaml.safe_load(arguments.jobset.read_text())
    jobset_version = jobset["apiVersion"].rpartition("/")[2]
    jsonschema.validate(jobset, closed(schema_of(definition, jobset_version)))
    newest = int(kubernetes_validate.latest_version().split(".")[1])
    versions = [f"1.{newest - age}.0" for age in reversed(range(5))]
    for resource in (*jobs(jobset), policy):
        for version in versions:
            kubernetes_validate.validate(resource, version, strict=True)
        print(f"{resource['kind']} {resource['metadata']['name']}: matches the schemas")
    print(
        json.dumps(
            {
                "jobset": jobset_version,
                "kubernetes": versions,
                "kubernetes_validate": importlib.metadata.version("kubernetes-validate"),
            }
        )
    )


def schema_of(definition: dict, version: str) -> dict:
    """Returns the schema of one version of a custom resource."""
    (found,) = (each for each in definition["spec"]["versions"] if each["name"] == version)
    return found["schema"]["openAPIV3Schema"]


def closed(schema):
    """Returns a schema that refuses all fields that it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: closed(each) for name, each in schema.items()}
    if "properties" in schema and schema.get("type") == "object" and schema["properties"]:
        result.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    return result


def jobs(jobset: dict) -> list[dict]:
    """Returns the Jobs that JobSet's controller would create."""
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{jobset['metadata']['name']}-{each['name']}-0"},
            "spec": each["template"]["spec"],
        }
        for each in jobset["spec"]["replicatedJobs"]
    ]


if __name__ == "__main__":
    main()
